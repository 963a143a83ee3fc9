"""Public reports about advantages, losses and resuming, as tests of ours. Numbers are the reporters'."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from sandmill.config.manifest import AdvantageScale, EnvironmentSection, LossScale, Manifest, ModelSection, Parameters, Spec
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure
from sandmill.errors import NonFinite, RunIncompatible, TrainingError
from sandmill.models.model import StopReason
from sandmill.models.policy import Scored
from sandmill.rollouts.trajectory import Episode, Group, Trajectory, Turn
from sandmill.store import RunFolder, Stream
from sandmill.training.advantages import group_advantages
from sandmill.training.batch import make_batch
from sandmill.training.checkpoint import CheckpointState, restore, save_checkpoint
from sandmill.training.learner import Learner


class TablePolicy:
    """Logits by previous token."""

    def __init__(self, table_VV: torch.Tensor) -> None:
        self.table_VV = torch.nn.Parameter(table_VV.clone())

    def score(self, ids_BT, lengths_B, select_BT, temperature):
        rows, positions = select_BT.nonzero(as_tuple=True)
        logprobs_KV = torch.log_softmax(self.table_VV[ids_BT[rows, positions - 1]] / temperature, -1)
        return Scored(logprobs_KV.gather(1, ids_BT[rows, positions][:, None])[:, 0], -(logprobs_KV.exp() * logprobs_KV).sum(-1))

    def score_packed(self, ids_N, starts, select_N, temperature):
        return self.score(ids_N[None], torch.tensor([len(ids_N)]), select_N[None], temperature)

    def trainable(self):
        return {"table": self.table_VV}

    def save_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file({"table": self.table_VV.detach().clone()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")


def turn(context, tokens, version=0):
    return Turn(
        context_ids=tuple(context),
        token_ids=tuple(tokens),
        logprobs=(math.log(1 / 4),) * len(tokens),
        policy_versions=(version,) * len(tokens),
        stop=StopReason.STOP,
    )


def group(*members, name="g"):
    """Members are (reward or None, turns)."""
    failure = InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason="node lost", retryable=True)
    return Group(
        id=name,
        task_id="task",
        episodes=tuple(
            Episode(
                group=name,
                index=index,
                task_id="task",
                trajectory=Trajectory(turns=tuple(turns), commands=(), spans=()),
                verdict=failure if reward is None else Graded(reward=reward, passed=reward == 1.0),
            )
            for index, (reward, turns) in enumerate(members)
        ),
    )


def batch(*groups, **parameters):
    return make_batch(groups, Parameters(**{"advantage": AdvantageScale.MEAN, **parameters}), policy_version=0)


def learner(table_VV=None):
    return Learner(TablePolicy(torch.zeros(4, 4) if table_VV is None else table_VV), Parameters())


@pytest.mark.case(12)
@pytest.mark.parametrize("scale", AdvantageScale)
def test_nvidia_nemo_rl_4161_one_step_is_not_ruined_by_a_singleton_beside_equal_rewards(scale):
    equal = [0.35] * 7
    assert group_advantages(equal, scale, 2).constant
    lone = group_advantages([*equal, 1.0], scale, 2).values
    assert max(map(abs, lone)) <= math.sqrt(7) + 1e-9
    noisy = group_advantages([*equal[:-1], 0.35 + 1e-8], scale, 2).values
    assert max(map(abs, noisy)) < 1e-3


@pytest.mark.case(52)
def test_own_probe_52_every_constant_group_is_seen_as_constant():
    missed = [
        (count, hundredths)
        for count in range(2, 33)
        for hundredths in range(1, 100)
        for scale in AdvantageScale
        if set(group_advantages([hundredths / 100] * count, scale, 2).values) != {0.0}
    ]
    assert missed == []


@pytest.mark.case(53)
def test_huggingface_trl_5902_an_ungradable_member_does_not_shift_its_siblings():
    assert group_advantages([1, 0, None, 1], AdvantageScale.MEAN, 2).values == pytest.approx([1 / 3, -2 / 3, None, 1 / 3])
    with_failure = batch(group((1.0, [turn([0], [1])]), (0.0, [turn([0], [2])]), (None, [turn([0], [3])]), (1.0, [turn([0], [1])])))
    without = batch(group((1.0, [turn([0], [1])]), (0.0, [turn([0], [2])]), (1.0, [turn([0], [1])])))
    assert [(row.advantage, row.weight) for row in with_failure.rows] == [(row.advantage, row.weight) for row in without.rows]
    assert with_failure.counts.failed == 1


@pytest.mark.case(53)
def test_modelscope_ms_swift_8123_a_nan_does_not_pass_as_a_success():
    table_VV = torch.zeros(4, 4)
    table_VV[0, 3] = math.nan
    broken = learner(table_VV)
    with pytest.raises(NonFinite, match="log-probability of sampled token 0 of episode 0 of group 'g'"):
        broken.step([group((1.0, [turn([0], [1])]), (0.0, [turn([0], [2])]))])
    assert broken.version == 0


@pytest.mark.case(55)
@pytest.mark.parametrize("loss", LossScale)
def test_verl_project_verl_6310_an_empty_answer_has_no_token_and_keeps_its_reward(loss):
    made = batch(group((0.0, [turn([0], [])]), (1.0, [turn([0], [1, 2])]), (0.5, [turn([0], [3])])), loss=loss)
    assert [row.index for row in made.rows] == [1]
    assert made.rows[0].advantage == 0.5
    assert made.counts.empty == 1


@pytest.mark.case(56)
def test_verl_project_verl_6349_nan_at_an_unselected_position_stays_out_of_loss_and_gradient():
    """The context token 3 has only NaN logits; the token after it was given, not sampled."""
    table_VV = torch.zeros(4, 4)
    table_VV[3] = math.nan
    made = learner(table_VV)
    stats = made.step([group((1.0, [turn([0, 3, 1], [1])]), (0.0, [turn([0], [2])]))])
    assert stats.applied
    assert math.isfinite(stats.loss)
    assert math.isfinite(stats.grad_norm)
    assert torch.isfinite(made.policy.table_VV[:3]).all()


@pytest.mark.case(56)
def test_nvidia_nemo_rl_158_a_step_without_a_token_is_skipped_and_said_so():
    made = learner()
    stats = made.step([group((1.0, [turn([0], [])]), (0.0, []))])
    assert (stats.applied, stats.loss, stats.grad_norm, stats.rows_empty, stats.version) == (False, None, None, 2, 0)


@pytest.mark.case(57)
def test_awslabs_agentcore_rl_toolkit_122_a_failure_before_the_first_token_makes_no_row():
    made = batch(group((1.0, [turn([0], [1])]), (0.0, [turn([0], [2])]), (None, []), (None, [turn([0], [1])])))
    assert [row.index for row in made.rows] == [0, 1]
    assert made.counts.failed == 2
    assert made.counts.empty == 0


@pytest.mark.case(58)
def test_radixark_miles_2800_one_lost_sandbox_does_not_cost_the_group_and_no_group_of_one_trains():
    lost_one = group(*[(float(index % 2), [turn([0], [1])]) for index in range(7)], (None, []))
    assert len(batch(lost_one, min_group_size=4).rows) == 7
    lost_most = group((1.0, [turn([0], [1])]), *[(None, [])] * 7)
    made = batch(lost_most, min_group_size=2)
    assert made.rows == ()
    assert (made.counts.dropped, made.counts.dropped_groups, made.counts.failed) == (1, 1, 7)
    half = group(*[(float(index % 2), [turn([0], [1])]) for index in range(3)], *[(None, [])] * 5, name="half")
    assert (batch(half, min_group_size=4).counts.dropped, len(batch(half, min_group_size=3).rows)) == (3, 3)


@pytest.mark.case(61)
def test_radixark_miles_1829_the_ratio_uses_the_recorded_logprob_and_a_token_without_one_is_refused():
    table_VV = torch.zeros(4, 4)
    table_VV[0, 1] = 1.0
    stats = learner(table_VV).step([group((1.0, [turn([0], [1])]), (0.0, [turn([0], [2])]))])
    now = 1.0 - math.log(math.e + 3)
    assert stats.max_logprob_mismatch == pytest.approx(now - math.log(1 / 4), abs=1e-6)
    bare = turn([0], [1])
    msgspec.structs.force_setattr(bare, "logprobs", ())
    with pytest.raises(TrainingError, match="1 sampled tokens, 0 log-probabilities and 1 policy versions"):
        batch(group((1.0, [bare]), (0.0, [turn([0], [2])])))
    with pytest.raises(TrainingError, match="claims policy versions 5 to 5"):
        batch(group((1.0, [turn([0], [1], version=5)]), (0.0, [turn([0], [2])])))


class Seen(msgspec.Struct, frozen=True):
    position: int


@pytest.mark.case(67)
def test_allenai_open_instruct_1523_resume_knows_the_groups_trained_and_drops_what_was_in_flight(tmp_path):
    manifest = Manifest(spec=Spec(model=ModelSection(uri="m"), environment=EnvironmentSection(name="e@1.0.0")))
    made = learner()
    with RunFolder.create(tmp_path / "run", manifest) as run:
        run.append(Stream.TRAJECTORIES, Seen(0))
        run.append(Stream.TRAJECTORIES, Seen(2))
        state = CheckpointState(step=2, environment_digest="data-1", model_digest="base", trained_positions=(0, 2))
        save_checkpoint(run, state, made.policy, made, keep=1)
        run.append(Stream.TRAJECTORIES, Seen(1))
    with RunFolder.resume(tmp_path / "run", manifest) as run:
        with pytest.raises(RunIncompatible, match="another environment"):
            restore(run, made, environment_digest="data-2", model_digest="base")
        resumed = restore(run, made, environment_digest="data-1", model_digest="base")
        assert resumed.trained_positions == (0, 2)
        assert [row.position for row in run.rows(Stream.TRAJECTORIES, Seen)] == [0, 2]
