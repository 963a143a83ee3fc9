"""A group's rewards in, its advantages out (float64), with what was left out and why.

A failure (reward None) takes part in neither baseline nor gradient. Whether a group is constant is decided on the raw rewards,
by max == min, never on a computed mean or deviation: rounding makes those lie (seven rewards of 0.35 have a float32 deviation of 1e-4).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from sandmill.config.manifest import AdvantageScale, RewardControl
from sandmill.errors import NonFinite

STD_FLOOR = 1e-4
"""Smallest deviation divided by. Below it lies the rounding noise of graders, which must not be blown up to unit size."""


class GroupAdvantages(NamedTuple):
    """Advantages in the order of the rewards; None stands for an episode outside baseline and gradient."""

    values: tuple[float | None, ...]
    failed: int
    """Episodes without a reward."""
    dropped: int
    """Episodes with a reward, left out because fewer than `min_group_size` of the group have one."""
    constant: bool
    """All rewards are equal: every advantage is exactly 0 and the group is to be skipped."""


def group_advantages(rewards: Sequence[float | None], scale: AdvantageScale, min_group_size: int, *, group: str = "") -> GroupAdvantages:
    """Advantages of one group of n graded episodes; every sum is correctly rounded (`math.fsum`), so their order does not matter.

    std            (r_i - mean) / max(s, STD_FLOOR), s = sqrt(sum (r_j - mean)^2 / n)      GRPO, arXiv:2402.03300, section 4.1.2
    mean           r_i - mean                                                              Dr. GRPO, arXiv:2503.20783, section 3.2
    leave-one-out  r_i - sum_{j != i} r_j / (n - 1)                                        RLOO, arXiv:2402.14740

    Raises NonFinite for a reward or an advantage that is not finite, naming `group` and the index.
    """
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise NonFinite(f"the reward of episode {index} of group {group!r}")
    graded = [float(reward) for reward in rewards if reward is not None]
    failed = len(rewards) - len(graded)
    if len(graded) < max(min_group_size, 2):
        return GroupAdvantages((None,) * len(rewards), failed, len(graded), False)
    if max(graded) == min(graded):
        return GroupAdvantages(tuple(None if reward is None else 0.0 for reward in rewards), failed, 0, True)
    try:
        scaled = iter(_scaled(graded, scale))
    except OverflowError:
        raise NonFinite(f"the advantages of group {group!r}, whose rewards are too large to add up") from None
    values = tuple(None if reward is None else next(scaled) for reward in rewards)
    if any(value is not None and not math.isfinite(value) for value in values):
        raise NonFinite(f"the advantages of group {group!r}")
    return GroupAdvantages(values, failed, 0, False)


def controlled_rewards(rewards: Sequence[float | None], control: RewardControl, seed: int, group: str) -> tuple[float | None, ...]:
    """The rewards that training sees. The recorded verdicts stay as they are.

    true: as graded. flipped: the sign changed. random: the graded rewards of the group dealt out anew, by a generator seeded with
    `seed` and the group's id. A failure stays a failure.
    """
    if control is RewardControl.TASK:
        return tuple(rewards)
    graded = [reward for reward in rewards if reward is not None]
    if control is RewardControl.FLIPPED:
        graded = [-reward for reward in graded]
    else:
        random.Random(f"{seed}/{group}").shuffle(graded)
    dealt = iter(graded)
    return tuple(None if reward is None else next(dealt) for reward in rewards)


def _scaled(rewards: list[float], scale: AdvantageScale) -> list[float]:
    count = len(rewards)
    if scale is AdvantageScale.LEAVE_ONE_OUT:
        negated = [-reward for reward in rewards]
        return [math.fsum([*negated, *[reward] * count]) / (count - 1) for reward in rewards]
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if scale is AdvantageScale.MEAN:
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / count)
    return [value / max(deviation, STD_FLOOR) for value in centred]
