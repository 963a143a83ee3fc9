"""Counts of an evaluation in; a rate and its confidence interval out. Failures of the infrastructure are never in the counts.

One attempt per task: Wilson's score interval (Wilson 1927, JASA 22:209). Several attempts per task are not independent, so the
task is the unit: the mean over tasks with a t interval on the spread between tasks (cluster-robust; Miller 2024,
arXiv:2411.00640), widened where it degenerates. Before against after: differences paired by task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from sandmill.rollouts.events import EvaluationFinished, TaskOutcome

LEVEL = 0.95


class Interval(NamedTuple):
    """A rate in [0, 1] (or a difference of two in [-1, 1]) and the two-sided interval around it."""

    rate: float
    low: float
    high: float
    tasks: int


def wilson(passed: int, graded: int, level: float = LEVEL) -> Interval | None:
    """Wilson's score interval of passed/graded independent attempts; None when there were none."""
    if graded == 0:
        return None
    z = NormalDist().inv_cdf(0.5 + level / 2)
    rate = passed / graded
    centre = (rate + z * z / (2 * graded)) / (1 + z * z / graded)
    half = z / (1 + z * z / graded) * math.sqrt(rate * (1 - rate) / graded + z * z / (4 * graded * graded))
    return Interval(rate, 0.0 if passed == 0 else max(0.0, centre - half), 1.0 if passed == graded else min(1.0, centre + half), graded)


def evaluation_interval(evaluation: EvaluationFinished, level: float = LEVEL) -> Interval | None:
    """The interval of an evaluation's pass rate, by the rule that fits how often each task was attempted."""
    return outcome_interval(evaluation.tasks, level)


def outcome_interval(tasks: Sequence[TaskOutcome], level: float = LEVEL) -> Interval | None:
    """Mean pass rate over tasks that were graded at least once; None when none was."""
    rates = [task.passed / task.graded for task in tasks if task.graded]
    if not rates:
        return None
    if all(task.graded <= 1 for task in tasks):
        return wilson(round(sum(rates)), len(rates), level)
    mean = math.fsum(rates) / len(rates)
    floor = wilson(round(mean * len(rates)), len(rates), level)
    if len(rates) < 2 or max(rates) == min(rates):
        # Without spread between tasks a t interval has width zero, which no finite sample supports.
        return floor if floor is None else Interval(mean, min(floor.low, mean), max(floor.high, mean), len(rates))
    half = student_t(level, len(rates) - 1) * math.sqrt(_variance(rates, mean) / len(rates))
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half), len(rates))


def paired_difference(before: EvaluationFinished, after: EvaluationFinished, level: float = LEVEL) -> Interval | None:
    """The mean over tasks graded in both of (rate after - rate before), with a t interval over tasks; None with no such task.

    One task, or no spread between tasks, gives the widest interval, -1 to 1, cut to what the counts allow (rule of three).
    """
    return difference_of(before.tasks, after.tasks, level)


def difference_of(before: Sequence[TaskOutcome], after: Sequence[TaskOutcome], level: float = LEVEL) -> Interval | None:
    """`paired_difference` of bare counts."""
    earlier = {task.task_id: task.passed / task.graded for task in before if task.graded}
    later = {task.task_id: task.passed / task.graded for task in after if task.graded}
    shifts = [later[task_id] - earlier[task_id] for task_id in earlier if task_id in later]
    if not shifts:
        return None
    mean = math.fsum(shifts) / len(shifts)
    if len(shifts) < 2 or max(shifts) == min(shifts):
        half = min(1.0, -math.log((1 - level) / 2) / len(shifts))
    else:
        half = student_t(level, len(shifts) - 1) * math.sqrt(_variance(shifts, mean) / len(shifts))
    return Interval(mean, max(-1.0, mean - half), min(1.0, mean + half), len(shifts))


def pass_at_k(tasks: Sequence[TaskOutcome], k: int) -> float | None:
    """Unbiased pass@k (Chen et al. 2021, arXiv:2107.03374, eq. 1), averaged over tasks with at least k graded attempts."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    chances = [1.0 - math.comb(task.graded - task.passed, k) / math.comb(task.graded, k) for task in tasks if task.graded >= k]
    return math.fsum(chances) / len(chances) if chances else None


def student_t(level: float, freedom: int) -> float:
    """The two-sided Student t quantile, by bisection of the exact distribution; accurate to 1e-9."""
    target, low, high = 0.5 + level / 2, 0.0, 1.0
    while _t_cdf(high, freedom) < target:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, freedom) < target else (low, middle)
        if high - low <= 1e-12 * high:
            break
    return (low + high) / 2


def _t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0: 1 - I_x(n/2, 1/2) / 2 with x = n / (n + t²)."""
    return 1.0 - 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function, by its continued fraction (Lentz; DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 / _away(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away(1 + term * d, tiny)
            c = _away(1 + term / c, tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


def _away(value: float, tiny: float) -> float:
    return tiny if abs(value) < tiny else value


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
