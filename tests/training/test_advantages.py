"""Advantages: properties that hold for every group, and the float traps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.config.manifest import AdvantageScale, RewardControl
from sandmill.errors import NonFinite
from sandmill.training.advantages import STD_FLOOR, controlled_rewards, group_advantages

rewards = st.lists(st.one_of(st.none(), st.floats(-5, 5)), max_size=12)


@given(st.integers(2, 33), st.floats(-1e6, 1e6), st.sampled_from(AdvantageScale), st.integers(0, 3))
def test_equal_rewards_are_constant_whatever_their_value(count, value, scale, failures):
    result = group_advantages([value] * count + [None] * failures, scale, 2)
    assert result.constant
    assert result.values == (0.0,) * count + (None,) * failures


@given(rewards, st.sampled_from(AdvantageScale), st.integers(2, 6))
def test_a_failure_is_absent_from_the_baseline(values, scale, min_size):
    with_failures = group_advantages(values, scale, min_size)
    without = group_advantages([value for value in values if value is not None], scale, min_size)
    assert tuple(value for value in with_failures.values if value is not None) == tuple(
        value for value in without.values if value is not None
    )
    assert with_failures.failed == sum(value is None for value in values)


@given(rewards, st.sampled_from(AdvantageScale), st.randoms())
def test_permuting_a_group_permutes_its_advantages_bit_for_bit(values, scale, random):
    order = list(range(len(values)))
    random.shuffle(order)
    straight = group_advantages(values, scale, 2).values
    assert group_advantages([values[i] for i in order], scale, 2).values == tuple(straight[i] for i in order)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12), st.sampled_from(AdvantageScale))
def test_advantages_sum_to_nothing(values, scale):
    result = group_advantages(values, scale, 2).values
    assert math.fsum(value for value in result if value is not None) == pytest.approx(0.0, abs=1e-9 * max(1.0, max(map(abs, result))))


def test_std_scaling_has_unit_population_deviation():
    values = group_advantages([1.0, 0.0, 0.0, 0.0], AdvantageScale.STD, 2).values
    assert values == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_rounding_noise_in_rewards_is_not_blown_up():
    noisy = [0.35, 0.35, 0.35 + 1e-9, 0.35]
    result = group_advantages(noisy, AdvantageScale.STD, 2)
    assert max(abs(value) for value in result.values) <= 1e-9 / STD_FLOOR


def test_leave_one_out_is_the_distance_to_the_mean_of_the_others():
    assert group_advantages([1.0, 0.5, None, 0.0], AdvantageScale.LEAVE_ONE_OUT, 2).values == (0.75, 0.0, None, -0.75)


def test_a_group_below_the_minimum_is_dropped_and_counted():
    result = group_advantages([1.0, None, 0.0, None], AdvantageScale.STD, 3)
    assert result.values == (None,) * 4
    assert (result.failed, result.dropped, result.constant) == (2, 2, False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(NonFinite, match=r"reward of episode 2 of group 'g7'"):
        group_advantages([0.0, 1.0, bad], AdvantageScale.MEAN, 2, group="g7")


def test_rewards_too_large_to_add_are_named():
    with pytest.raises(NonFinite, match="'g7'"):
        group_advantages([1.7e308, 1.7e308, -1.0], AdvantageScale.STD, 2, group="g7")


@given(rewards, st.integers(), st.text(max_size=5))
def test_controls_keep_failures_in_their_place(values, seed, group):
    for control in RewardControl:
        changed = controlled_rewards(values, control, seed, group)
        assert [value is None for value in changed] == [value is None for value in values]
        assert controlled_rewards(values, control, seed, group) == changed


def test_the_random_control_deals_the_rewards_out_anew_and_the_flipped_one_changes_their_sign():
    values = [float(i) for i in range(20)]
    dealt = controlled_rewards(values, RewardControl.RANDOM, 1, "g")
    assert list(dealt) != values
    assert sorted(dealt) == values
    assert dealt != controlled_rewards(values, RewardControl.RANDOM, 1, "h")
    assert controlled_rewards(values, RewardControl.FLIPPED, 1, "g") == tuple(-value for value in values)
