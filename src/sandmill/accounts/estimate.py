"""A plan (steps, seconds per step, what runs meanwhile) in, the cost before anything is spent out.

Machines and sandboxes bill for the whole time, also while they wait for each other: cost = hours x count x price per hour.
"""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec

from sandmill.accounts.prices import cost_of_hours, total


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run will take. Prices are micro-dollars per hour for one; None is unknown."""

    steps: int
    seconds_per_step: float
    """Published for the preset, or measured on this machine."""
    machines: int = 1
    machine_microusd_per_hour: int | None
    sandboxes: int
    sandbox_microusd_per_hour: int | None
    extra_s: float = 0.0
    """Time outside the steps: start, warm start, evaluations."""

    def __post_init__(self) -> None:
        durations = (self.seconds_per_step, self.extra_s)
        if min(self.steps, self.machines, self.sandboxes) < 0 or not all(math.isfinite(s) and s >= 0 for s in durations):
            raise ValueError("a plan's counts and seconds must be finite and not negative")


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's time and cost (micro-dollars; None is unknown)."""

    seconds: float
    machines_microusd: int | None
    sandboxes_microusd: int | None
    total_microusd: int | None

    @property
    def sandbox_share(self) -> float | None:
        """The sandboxes' share of the total, in [0, 1]; None where the total is unknown or nothing."""
        if self.sandboxes_microusd is None or not self.total_microusd:
            return None
        return self.sandboxes_microusd / self.total_microusd


def estimate(plan: Plan) -> Estimate:
    """Time and cost of a plan, exact until one rounding (half to even) to a micro-dollar per line."""
    seconds = Fraction(plan.seconds_per_step) * plan.steps + Fraction(plan.extra_s)
    machines = cost_of_hours(plan.machine_microusd_per_hour, seconds, plan.machines)
    sandboxes = cost_of_hours(plan.sandbox_microusd_per_hour, seconds, plan.sandboxes)
    return Estimate(
        seconds=float(seconds),
        machines_microusd=machines,
        sandboxes_microusd=sandboxes,
        total_microusd=total((machines, sandboxes)),
    )
