"""Intervals agree with independent references and never invent certainty."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import scipy.stats

from sandmill.reports.intervals import evaluation_interval, outcome_interval, paired_difference, pass_at_k, student_t, wilson
from sandmill.rollouts.events import EvaluationFinished, EvaluationPhase, TaskOutcome


def outcomes(pairs, failures=0):
    named = enumerate(pairs)
    return tuple(TaskOutcome(task_id=f"t{n}", passed=passed, graded=graded, failures=failures) for n, (passed, graded) in named)


def evaluation(pairs, phase=EvaluationPhase.BEFORE):
    tasks = outcomes(pairs)
    return EvaluationFinished(split="heldout", phase=phase, step=0, greedy=False, samples_per_task=1, tasks=tasks, seconds=1.0)


@pytest.mark.parametrize(("passed", "graded"), [(0, 1), (1, 1), (0, 96), (96, 96), (19, 96), (48, 96), (1, 2), (999, 1000)])
def test_wilson_agrees_with_scipy(passed, graded):
    reference = scipy.stats.binomtest(passed, graded).proportion_ci(0.95, method="wilson")
    found = wilson(passed, graded)
    assert found.low == pytest.approx(reference.low, abs=1e-12)
    assert found.high == pytest.approx(reference.high, abs=1e-12)
    assert found.low <= found.rate <= found.high


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 95, 1000])
@pytest.mark.parametrize("level", [0.8, 0.9, 0.95, 0.99])
def test_student_t_agrees_with_scipy(level, freedom):
    assert student_t(level, freedom) == pytest.approx(scipy.stats.t.ppf(0.5 + level / 2, freedom), rel=1e-8)


def test_several_attempts_per_task_count_the_task_not_the_attempt():
    certain = [(8, 8)] * 12 + [(0, 8)] * 12
    found = outcome_interval(outcomes(certain))
    rates = np.array([passed / graded for passed, graded in certain])
    low, high = scipy.stats.t.interval(0.95, len(rates) - 1, rates.mean(), rates.std(ddof=1) / math.sqrt(len(rates)))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    naive = wilson(96, 192)
    assert found.high - found.low > 2 * (naive.high - naive.low)


def test_the_interval_over_tasks_covers_the_truth_as_often_as_it_says():
    random.seed(7)
    covered = 0
    for _ in range(600):
        skills = [random.betavariate(0.6, 0.9) for _ in range(48)]
        pairs = [(sum(random.random() < skill for _ in range(4)), 4) for skill in skills]
        found = outcome_interval(outcomes(pairs))
        covered += found.low <= 0.4 <= found.high
    assert 0.92 <= covered / 600 <= 0.98


def test_no_spread_between_tasks_is_not_certainty():
    found = outcome_interval(outcomes([(4, 4)] * 10))
    assert found.rate == 1.0
    assert found.low < 0.75
    assert outcome_interval(outcomes([(2, 4)] * 10)).low < 0.35
    assert outcome_interval(outcomes([(3, 4)])).high - outcome_interval(outcomes([(3, 4)])).low > 0.5


def test_failures_are_in_no_rate():
    assert outcome_interval(outcomes([(0, 0), (0, 0)], failures=3)) is None
    with_failures = outcome_interval((*outcomes([(1, 1), (0, 1)]), TaskOutcome(task_id="x", passed=0, graded=0, failures=1)))
    assert with_failures == outcome_interval(outcomes([(1, 1), (0, 1)]))
    assert evaluation_interval(evaluation([])) is None


def test_the_paired_change_agrees_with_scipy_and_uses_only_tasks_graded_in_both():
    random.seed(3)
    before = [(random.randint(0, 2), 4) for _ in range(40)] + [(0, 0)]
    after = [(random.randint(1, 4), 4) for _ in range(40)] + [(4, 4)]
    found = paired_difference(evaluation(before), evaluation(after))
    shifts = np.array([a[0] / 4 - b[0] / 4 for b, a in zip(before[:40], after[:40], strict=True)])
    low, high = scipy.stats.t.interval(0.95, 39, shifts.mean(), scipy.stats.sem(shifts))
    assert (found.rate, found.low, found.high) == pytest.approx((shifts.mean(), low, high), abs=1e-9)
    assert found.tasks == 40
    assert paired_difference(evaluation([]), evaluation(after)) is None


def test_an_equal_change_everywhere_still_has_an_interval():
    found = paired_difference(evaluation([(0, 1)] * 20), evaluation([(1, 1)] * 20))
    assert found.rate == 1.0
    assert 0.7 < found.low < 1.0
    one = paired_difference(evaluation([(0, 1)]), evaluation([(1, 1)]))
    assert one.high - one.low >= 1.0


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_agrees_with_all_subsets(k):
    tasks = outcomes([(0, 6), (1, 6), (3, 6), (6, 6), (2, 5)])
    exact = [1 - math.comb(task.graded - task.passed, k) / math.comb(task.graded, k) for task in tasks]
    assert pass_at_k(tasks, k) == pytest.approx(sum(exact) / len(exact), abs=1e-12)
    assert pass_at_k(outcomes([(1, 2)]), 3) is None
    with pytest.raises(ValueError, match="at least 1"):
        pass_at_k(tasks, 0)
