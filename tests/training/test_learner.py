"""The learner on a real Hugging Face model with a peft adapter: layouts, splits, all-or-nothing steps, exact state."""

from __future__ import annotations

import math

import pytest
import torch
from training_policies import BigramPolicy, LlamaPolicy, group_of, turn

from sandmill.config.manifest import AdvantageScale, ImportanceLevel, LossScale, Parameters, RateSchedule, RewardControl, SamplingSection
from sandmill.errors import NonFinite, TrainingError
from sandmill.models.policy import Scored
from sandmill.training.batch import Layout, make_batch
from sandmill.training.learner import Learner, accumulate_gradient


def groups_for(policy, seed=0, version=0, groups=3, size=4):
    """Random multi-turn episodes whose log-probabilities are the policy's own."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, count):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    made = []
    for number in range(groups):
        members = []
        for index in range(size):
            shape = [(integers(1, 4, 1)[0], integers(1, 5, 1)[0]) for _ in range(1 + index % 3)]
            turns = [(integers(0, 23, given), integers(0, 23, sampled)) for given, sampled in shape]
            members.append((float(index == 0 or (index + number) % 3 == 0), exact_turns(policy, turns, version)))
        made.append(group_of(f"g{number}", members))
    return made


def exact_turns(policy, turns, version):
    ids = torch.tensor([[token for given, sampled in turns for token in (*given, *sampled)]])
    select = torch.tensor([[flag for given, sampled in turns for flag in [False] * len(given) + [True] * len(sampled)]])
    with torch.no_grad():
        logprobs = iter(policy.score(ids, torch.tensor([ids.shape[1]]), select, 1.0).logprobs_K.tolist())
    return [turn(given, sampled, [next(logprobs) for _ in sampled], version) for given, sampled in turns]


def gradient(policy, groups, parameters, layout):
    for parameter in policy.trainable().values():
        parameter.grad = None
    accumulate_gradient(policy, make_batch(groups, parameters, policy_version=0), parameters, layout, policy_version=0)
    return torch.cat([parameter.grad.flatten() for parameter in policy.trainable().values()])


def bits(policy):
    return [parameter.detach().clone() for parameter in policy.trainable().values()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("importance", ImportanceLevel)
@pytest.mark.parametrize("loss", LossScale)
def test_padded_packed_and_every_split_give_the_same_gradient(loss, importance):
    policy = LlamaPolicy()
    groups = groups_for(policy)
    whole = gradient(policy, groups, Parameters(loss=loss, importance=importance, entropy_bonus=0.01), Layout.PADDED)
    assert whole.abs().max() > 1e-5
    for layout in (Layout.PADDED, Layout.PACKED):
        for size in (1, 2, 5, 64):
            parameters = Parameters(loss=loss, importance=importance, entropy_bonus=0.01, micro_batch_size=size)
            torch.testing.assert_close(gradient(policy, groups, parameters, layout), whole, rtol=1e-9, atol=1e-12)


def test_on_policy_statistics_are_exact():
    policy = LlamaPolicy()
    stats = Learner(policy, Parameters()).step(groups_for(policy))
    assert stats.applied
    assert stats.version == 1
    assert stats.max_logprob_mismatch is not None
    assert stats.max_logprob_mismatch < 1e-12
    assert stats.kl == pytest.approx(0.0, abs=1e-12)
    assert stats.clip_fraction == 0.0
    assert stats.tokens_used <= stats.tokens_sampled
    assert 0 < stats.entropy <= math.log(23)


def test_mismatch_is_unknown_when_nothing_was_sampled_under_these_weights_or_with_top_p():
    policy = LlamaPolicy()
    learner = Learner(policy, Parameters())
    old = groups_for(policy)
    assert learner.step(old).max_logprob_mismatch is not None
    assert learner.step(old).max_logprob_mismatch is None
    truncated = Learner(policy, Parameters(sampling=SamplingSection(top_p=0.9)))
    assert truncated.step(groups_for(policy)).max_logprob_mismatch is None


def test_steps_raise_the_probability_of_rewarded_replies_and_the_flipped_control_lowers_it():
    ids, select = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[False, False, True, True, True]])

    def change(control):
        policy = LlamaPolicy()
        learner = Learner(policy, Parameters(learning_rate=0.02, reward=control))

        def good():
            return policy.score(ids, torch.tensor([5]), select, 1.0).logprobs_K.sum().item()

        before = good()
        for version in range(5):
            replies = [exact_turns(policy, [([1, 2], reply)], version) for reply in ([3, 4, 5], [6, 7, 8])]
            learner.step([group_of("g", [(1.0, replies[0]), (0.0, replies[1])])])
        return good() - before

    assert change(RewardControl.TASK) > 0.1
    assert change(RewardControl.FLIPPED) < -0.1


def test_a_step_without_tokens_is_skipped_and_says_so():
    policy = LlamaPolicy()
    learner = Learner(policy, Parameters())
    before = bits(policy)
    stats = learner.step([group_of("g", [(1.0, [turn([1], [2])])] * 3), group_of("h", [(None, [])] * 2)])
    assert not stats.applied
    assert (stats.loss, stats.grad_norm, stats.entropy, stats.kl, stats.clip_fraction) == (None,) * 5
    assert (stats.version, stats.rows_skipped, stats.rows_failed, stats.groups_constant) == (0, 3, 2, 1)
    assert equal(bits(policy), before)
    assert "exp_avg.table" not in learner.state_dict()


def test_the_gradient_is_clipped_to_the_norm_and_the_norm_before_is_reported():
    policy = BigramPolicy(torch.randn(23, 23, generator=torch.Generator().manual_seed(1)))
    limited = Learner(policy, Parameters(max_grad_norm=1e-3))
    stats = limited.step(groups_for(policy))
    assert stats.grad_norm > 1e-3
    moment = limited.state_dict()["exp_avg.table"] / 0.1
    assert float(moment.norm()) == pytest.approx(1e-3)


class Poisoned(LlamaPolicy):
    """A real policy with one number spoilt on the way out or on the way back."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def score(self, ids_BT, lengths_B, select_BT, temperature):
        scored = super().score(ids_BT, lengths_B, select_BT, temperature)
        if self.where == "nowhere":
            return scored
        spoil = torch.zeros_like(scored.logprobs_K)
        spoil[2] = math.nan
        if self.where == "logprob":
            return Scored(scored.logprobs_K + spoil, scored.entropies_K)
        if self.where == "entropy":
            return Scored(scored.logprobs_K, scored.entropies_K + spoil)
        scored.logprobs_K.register_hook(lambda grad: grad + spoil)
        return scored


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ("logprob", r"the log-probability of sampled token 2 of episode \d of group 'g\d'"),
        ("entropy", r"the entropy of sampled token 2 of episode \d of group 'g\d'"),
        ("gradient", r"the gradient of .*lora_[AB]"),
    ],
)
def test_a_nan_anywhere_stops_the_step_with_its_place_and_changes_nothing(where, place):
    policy = Poisoned("nowhere")
    learner = Learner(policy, Parameters(), layout=Layout.PADDED)
    groups = groups_for(policy)
    learner.step(groups)
    weights, state = bits(policy), learner.state_dict()
    policy.where = where
    with pytest.raises(NonFinite, match=place):
        learner.step(groups)
    assert equal(bits(policy), weights)
    after = learner.state_dict()
    assert set(after) == set(state)
    assert all(torch.equal(after[key], value) for key, value in state.items())
    policy.where = "nowhere"
    assert learner.step(groups).version == 2


def test_an_overflowing_loss_is_named():
    policy = LlamaPolicy()
    group = group_of("g", [(0.0, [turn([1], [2], [-2000.0])]), (1.0, [turn([1], [3], [-3.0])])])
    with pytest.raises(NonFinite, match=r"the loss of .*episode 0 of group 'g'"):
        Learner(policy, Parameters(advantage=AdvantageScale.MEAN)).step([group])


def test_a_policy_that_answers_too_few_values_is_refused():
    class Short(LlamaPolicy):
        def score(self, ids_BT, lengths_B, select_BT, temperature):
            scored = super().score(ids_BT, lengths_B, select_BT, temperature)
            return Scored(scored.logprobs_K[:-1], scored.entropies_K[:-1])

    policy = LlamaPolicy()
    with pytest.raises(TrainingError, match="values for"):
        Learner(Short(), Parameters(), layout=Layout.PADDED).step(groups_for(policy))


@pytest.mark.parametrize("taken", [0, 2])
def test_a_restored_learner_continues_bit_for_bit(taken):
    policy = LlamaPolicy(torch.float32)
    learner = Learner(policy, Parameters(learning_rate=0.01, weight_decay=0.1))
    steps = [groups_for(policy, seed) for seed in range(4)]
    for groups in steps[:taken]:
        learner.step(groups)
    state = learner.state_dict()
    for groups in steps[taken:]:
        learner.step(groups)

    other = LlamaPolicy(torch.float32)
    with torch.no_grad():
        for parameter in other.trainable().values():
            parameter.add_(1.0)
    restored = Learner(other, Parameters(learning_rate=0.01, weight_decay=0.1))
    restored.load_state_dict(state)
    assert restored.version == taken
    for groups in steps[taken:]:
        restored.step(groups)
    final, again = learner.state_dict(), restored.state_dict()
    assert set(final) == set(again)
    assert all(torch.equal(final[key], again[key]) for key in final if key != "generator")


def test_the_state_of_another_adapter_is_refused():
    learner = Learner(LlamaPolicy(), Parameters())
    state = learner.state_dict()
    name = next(key for key in state if key.startswith("weight."))
    with pytest.raises(TrainingError, match="another adapter"):
        learner.load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(TrainingError, match="another shape"):
        learner.load_state_dict({**state, name: torch.zeros(2, 2)})


def test_a_linear_rate_falls_by_equal_parts_and_goes_on_where_it_was_saved():
    parameters = Parameters(steps=4, learning_rate=0.4, learning_rate_schedule=RateSchedule.LINEAR)
    policy = LlamaPolicy()
    learner, groups = Learner(policy, parameters), groups_for(policy)
    assert [learner.step(groups).learning_rate for _ in range(2)] == pytest.approx([0.4, 0.3])
    saved = learner.state_dict()
    assert [learner.step(groups).learning_rate for _ in range(3)] == pytest.approx([0.2, 0.1, 0.0])
    weights = bits(policy)
    again = Learner(policy, parameters)
    again.load_state_dict(saved)
    assert [again.step(groups).learning_rate for _ in range(3)] == pytest.approx([0.2, 0.1, 0.0])
    assert equal(bits(policy), weights)


def test_a_skipped_step_has_no_rate_and_uses_none_up():
    policy = LlamaPolicy()
    learner = Learner(policy, Parameters(steps=4, learning_rate=0.4, learning_rate_schedule=RateSchedule.LINEAR))
    assert learner.step([group_of("g", [(1.0, [turn([1], [2])])] * 3)]).learning_rate is None
    assert learner.step([group_of("g", [(1.0, [turn([1], [2])]), (0.0, [turn([1], [3])])])]).learning_rate == 0.4
