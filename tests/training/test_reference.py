"""Advantage, loss and gradient against the independent float64 reference, in every convention."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from grpo_reference import reference_advantages, reference_step
from hypothesis import given, settings
from hypothesis import strategies as st
from training_policies import BigramPolicy, group_of, turn

from sandmill.config.manifest import AdvantageScale, ImportanceLevel, LossScale, Parameters, SamplingSection
from sandmill.training.advantages import group_advantages
from sandmill.training.batch import Layout, make_batch
from sandmill.training.learner import accumulate_gradient

VOCABULARY = 7
CONVENTIONS = list(itertools.product(AdvantageScale, LossScale, ImportanceLevel))

reward_values = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.35, 1.0, 1.1, -1.0]), st.floats(-2, 2, allow_nan=False))
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
logprob_values = st.floats(-3.5, -0.05)


@st.composite
def turns(draw):
    made = []
    for _ in range(draw(st.integers(1, 3))):
        sampled = draw(tokens)
        context = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3))
        made.append(turn(context, sampled, [draw(logprob_values) for _ in sampled]))
    return made


@st.composite
def steps(draw):
    groups = []
    for name in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 5))
        constant = draw(st.booleans()) and draw(st.booleans())
        value = draw(reward_values)
        groups.append(group_of(f"g{name}", [(value if constant else draw(reward_values), draw(turns())) for _ in range(size)]))
    return groups


def computed(table, groups, parameters, layout=Layout.PADDED):
    policy = BigramPolicy(torch.from_numpy(table))
    batch = make_batch(groups, parameters, policy_version=0)
    tally = accumulate_gradient(policy, batch, parameters, layout, policy_version=0)
    gradient = policy.table_VV.grad
    return tally.loss, np.zeros_like(table) if gradient is None else gradient.numpy()


@pytest.mark.parametrize(("advantage", "loss", "importance"), CONVENTIONS)
@settings(max_examples=25, deadline=None)
@given(groups=steps(), seed=st.integers(0, 1000), bonus=st.sampled_from([0.0, 0.01]), temperature=st.sampled_from([1.0, 0.7]))
def test_loss_and_gradient_equal_the_reference(advantage, loss, importance, groups, seed, bonus, temperature):
    table = np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY))
    parameters = Parameters(
        advantage=advantage,
        loss=loss,
        importance=importance,
        entropy_bonus=bonus,
        clip_low=0.2,
        clip_high=0.28,
        max_completion_length=4,
        micro_batch_size=3,
        sampling=SamplingSection(temperature=temperature),
    )
    expected_loss, expected_gradient = reference_step(table, groups, parameters)
    for layout in Layout:
        actual_loss, actual_gradient = computed(table, groups, parameters, layout)
        assert actual_loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
        np.testing.assert_allclose(actual_gradient, expected_gradient, rtol=1e-9, atol=1e-9)


@settings(max_examples=300, deadline=None)
@given(rewards=st.lists(reward_values, max_size=9), scale=st.sampled_from(AdvantageScale), min_size=st.integers(2, 5))
def test_advantages_equal_the_reference(rewards, scale, min_size):
    actual = group_advantages(rewards, scale, min_size)
    for ours, theirs in zip(actual.values, reference_advantages(rewards, scale.value, min_size), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("advantage", "loss", "importance"), CONVENTIONS)
def test_the_order_of_groups_and_episodes_does_not_change_the_gradient(advantage, loss, importance):
    random = np.random.default_rng(3)
    table = random.normal(size=(VOCABULARY, VOCABULARY))
    groups = [
        group_of(
            f"g{g}", [(float(random.random() < 0.5) + g * (i == 0), [turn([1, i], [2, i, 3], random.uniform(-3, -1, 3))]) for i in range(4)]
        )
        for g in range(3)
    ]
    shuffled = [group_of(g.id, [(e.reward, e.trajectory.turns) for e in reversed(g.episodes)]) for g in reversed(groups)]
    parameters = Parameters(advantage=advantage, loss=loss, importance=importance)
    first, second = computed(table, groups, parameters), computed(table, shuffled, parameters)
    assert first[0] == pytest.approx(second[0], rel=1e-12)
    np.testing.assert_allclose(first[1], second[1], rtol=1e-11, atol=1e-13)


def test_a_hand_computed_step():
    """Two episodes of one token each, rewards 1 and 0, uniform policy over 7 tokens, on policy, token-level mean advantage."""
    table = np.zeros((VOCABULARY, VOCABULARY))
    uniform = float(np.log(1 / VOCABULARY))
    groups = [group_of("g", [(1.0, [turn([0], [1], [uniform])]), (0.0, [turn([0], [2], [uniform])])])]
    loss, gradient = computed(table, groups, Parameters(advantage=AdvantageScale.MEAN))
    assert loss == pytest.approx(0.0, abs=1e-15)
    expected = np.zeros_like(table)
    expected[0, 1], expected[0, 2] = -0.25, 0.25
    np.testing.assert_allclose(gradient, expected, atol=1e-15)
