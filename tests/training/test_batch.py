"""From groups to rows: what counts where, layouts, and what is refused."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from training_policies import episode, group_of, turn

from sandmill.config.manifest import AdvantageScale, LossScale, Parameters
from sandmill.errors import NonFinite, TrainingError
from sandmill.rollouts.trajectory import Group
from sandmill.training.batch import Layout, make_batch, micro_batches

MEAN = Parameters(advantage=AdvantageScale.MEAN)


def batch_of(*groups, parameters=MEAN, version=0):
    return make_batch(groups, parameters, policy_version=version)


def test_a_row_is_the_whole_episode_up_to_its_last_sampled_token():
    turns = [turn([1, 2], [3, 4], [-0.1, -0.2]), turn([5], [6], [-0.3]), turn([7, 8], [])]
    batch = batch_of(group_of("g", [(1.0, turns), (0.0, [turn([1], [2])])]))
    row = batch.rows[0]
    assert row.ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.sampled_T.tolist() == [False, False, True, True, False, True]
    assert row.logprobs_K.tolist() == [-0.1, -0.2, -0.3]
    assert row.logprobs_K.dtype == torch.float64
    assert row.advantage == 0.5


def test_every_episode_is_accounted_for():
    batch = batch_of(
        group_of("mixed", [(1.0, [turn([1], [2, 3])]), (0.0, [turn([1], [2])]), (None, [turn([1], [2])]), (0.5, [turn([1], [])])]),
        group_of("constant", [(1.0, [turn([1], [2])])] * 3),
        group_of("small", [(1.0, [turn([1], [2])]), (None, [turn([1], [])])]),
    )
    counts = batch.counts
    assert [(row.group, row.index) for row in batch.rows] == [("mixed", 0), ("mixed", 1)]
    assert counts.episodes == 9
    assert (counts.failed, counts.dropped, counts.empty, counts.skipped) == (2, 1, 1, 3)
    assert (counts.constant_groups, counts.dropped_groups) == (1, 1)
    assert counts.sampled_tokens == 6
    assert counts.episodes == counts.failed + counts.dropped + counts.empty + counts.skipped + len(batch.rows)


@pytest.mark.parametrize(
    ("loss", "weights"),
    [(LossScale.TOKEN, [1 / 6, 1 / 6]), (LossScale.SEQUENCE, [1 / (6 * 2), 1 / 6]), (LossScale.CONSTANT, [1 / (6 * 8 * 3)] * 2)],
)
def test_rows_without_gradient_still_count_in_the_divisor(loss, weights):
    parameters = Parameters(advantage=AdvantageScale.MEAN, loss=loss, max_completion_length=8, max_turns=3)
    batch = batch_of(
        group_of("mixed", [(1.0, [turn([1], [2, 3])]), (0.0, [turn([1], [2])]), (None, [turn([1], [2])]), (0.5, [turn([1], [])])]),
        group_of("constant", [(1.0, [turn([1], [2])])] * 3),
        parameters=parameters,
    )
    assert [row.weight for row in batch.rows] == weights


def test_a_zero_advantage_keeps_its_row_only_for_the_entropy_bonus():
    group = group_of("g", [(reward, [turn([1], [2])]) for reward in (0.0, 0.5, 1.0)])
    assert [row.index for row in batch_of(group).rows] == [0, 2]
    with_bonus = Parameters(advantage=AdvantageScale.MEAN, entropy_bonus=0.01)
    assert [row.index for row in batch_of(group, parameters=with_bonus).rows] == [0, 1, 2]


def test_no_groups_and_no_tokens_make_no_rows():
    assert batch_of().rows == ()
    assert batch_of(group_of("g", [(1.0, [turn([1], [])]), (0.0, [])])).rows == ()


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.PACKED])
@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_micro_batches_hold_every_row_once_longest_first(layout, size):
    group = group_of("g", [(float(i), [turn([1] * (1 + i % 3), list(range(2, 4 + i)))]) for i in range(5)])
    micros = list(micro_batches(batch_of(group).rows, size, layout))
    lengths = [len(row.ids_T) for micro in micros for row in micro.rows]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(row.index for micro in micros for row in micro.rows) == [0, 1, 3, 4]  # the middle reward is the mean
    for micro in micros:
        assert sampled_of(micro) == [token for row in micro.rows for token in row.ids_T[row.sampled_T].tolist()]
        assert len(micro.row_K) == len(micro.logprobs_K) == int(micro.select.sum())
        assert micro.place(0) == f"sampled token 0 of {micro.rows[0].name}"
        assert micro.place(len(micro.row_K) - 1).endswith(micro.rows[-1].name)


def sampled_of(micro):
    """The sampled tokens of all rows."""
    return (micro.ids if micro.paths_BT is None else micro.ids[micro.paths_BT])[micro.select].tolist()


def paths_of(micro):
    return [micro.ids[path[:length]].tolist() for path, length in zip(micro.paths_BT, micro.lengths_B.tolist(), strict=True)]


def test_a_tree_holds_what_rows_begin_with_alike_once():
    members = [[turn([1, 2, 3], [0, 4])], [turn([1, 2, 3], [0, 5])], [turn([1, 2, 3], [0, 4]), turn([8], [9])], [turn([1, 2, 3], [0, 4])]]
    groups = [group_of(name, [(float(index), turns) for index, turns in enumerate(members)]) for name in "ab"]
    groups.append(group_of("c", [(float(index), [turn([1, 7], [index])]) for index in range(2)]))
    (micro,) = micro_batches(batch_of(*groups).rows, 64, Layout.TREE)
    assert sorted(micro.ids.tolist()) == [0, 0, 1, 1, 2, 3, 4, 5, 7, 8, 9]
    assert paths_of(micro) == [row.ids_T.tolist() for row in micro.rows]
    assert [row.group for row in micro.rows] == ["a"] * 4 + ["b"] * 4 + ["c"] * 2
    assert sampled_of(micro) == [token for row in micro.rows for token in row.ids_T[row.sampled_T].tolist()]


def test_a_token_of_a_tree_has_the_same_tokens_before_it_in_all_its_rows():
    """The same token at the same place after another beginning is another one."""
    rows = batch_of(group_of("a", [(0.0, [turn([1, 2, 3], [4])]), (1.0, [turn([1, 9, 3], [4])]), (2.5, [turn([8], [4])])])).rows
    for size in (1, 2, 64):
        micros = list(micro_batches(rows, size, Layout.TREE))
        assert [path for micro in micros for path in paths_of(micro)] == [[1, 2, 3, 4], [1, 9, 3, 4], [8, 4]]
    assert micros[0].ids.tolist() == [1, 2, 3, 4, 9, 3, 4, 8, 4]


def forged(**changes):
    """A turn whose lengths disagree, as no constructor would make it."""
    made = turn([1], [2, 3])
    for name, value in changes.items():
        msgspec.structs.force_setattr(made, name, value)
    return Group(id="g", task_id="t", episodes=(episode("g", 0, 1.0, [made]), episode("g", 1, 0.0, [turn([1], [2])])))


@pytest.mark.parametrize("changes", [{"logprobs": ()}, {"logprobs": (-1.0,)}, {"policy_versions": ()}, {"policy_versions": (0, 0, 0)}])
def test_tokens_without_logprob_or_version_are_refused(changes):
    with pytest.raises(TrainingError, match=r"episode 0 of group 'g' cannot be trained on"):
        batch_of(forged(**changes))


def test_a_policy_that_does_not_exist_yet_cannot_have_sampled():
    group = group_of("g", [(1.0, [turn([1], [2], version=3)]), (0.0, [turn([1], [2], version=1)])])
    with pytest.raises(TrainingError, match="claims policy versions 3 to 3, the newest is 2"):
        batch_of(group, version=2)
    assert len(batch_of(group, version=3).rows) == 2


def test_a_reply_to_nothing_is_refused():
    with pytest.raises(TrainingError, match="sampled from no context"):
        batch_of(group_of("g", [(1.0, [turn([], [2])]), (0.0, [turn([1], [2])])]))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_recorded_logprob_that_is_not_finite_is_named(bad):
    with pytest.raises(NonFinite, match="recorded log-probability of sampled token 1 of episode 1 of group 'g'"):
        batch_of(group_of("g", [(1.0, [turn([1], [2])]), (0.0, [turn([1], [2, 3], [-1.0, bad])])]))
