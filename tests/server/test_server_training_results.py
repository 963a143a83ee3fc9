"""What two evaluations and a run's steps come to: rates over what was scored, and no change where none can be seen."""

from __future__ import annotations

import pytest

from sandmill.rollouts.events import EvaluationFinished, EvaluationPhase, StepFinished, TaskOutcome
from sandmill.server.training_results import comparison, diagnostics, phase_summary


def row(passed: int, tasks: int = 20, failures: int = 0, first: int = 0) -> EvaluationFinished:
    """An evaluation in which the first tasks passed and the last ones had no score."""
    outcomes = tuple(
        TaskOutcome(
            task_id=f"t{first + number}",
            passed=int(number < passed),
            graded=int(number < tasks - failures),
            failures=int(number >= tasks - failures),
            reward_sum=float(number < passed),
        )
        for number in range(tasks)
    )
    return EvaluationFinished(
        split="heldout", phase=EvaluationPhase.BEFORE, step=0, greedy=False, samples_per_task=1, tasks=outcomes, seconds=1.0
    )


def step(**figures: float) -> StepFinished:
    return StepFinished(step=1, steps=1, at_s=0.0, seconds={}, episode_seconds={}, episodes=8, passed=0, failures=0, **figures)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "reason", "change"),
    [
        (row(5), row(15), "Comparable", "50.00"),
        (row(5), row(4), "SmallestStep", "-5.00"),
        (row(0), row(0), "NonePassed", "0.00"),
        (row(20), row(20), "AllPassed", "0.00"),
        (row(5, tasks=15), row(9, tasks=15), "TooFewTasks", "26.67"),
        (row(5), row(9, first=1), "DifferentTasks", None),
        (row(5), row(9, failures=1), "IncompleteEvents", None),
    ],
)
def test_a_comparison_says_whether_it_is_one(
    before: EvaluationFinished, after: EvaluationFinished, reason: str, change: str | None
) -> None:
    found = comparison(before, after, 16)
    assert (found["reason"], found.get("changePP")) == (reason, change)
    assert found["measurable"] is (reason in ("Comparable", "SmallestStep"))


def test_what_failed_is_in_no_rate() -> None:
    assert phase_summary(row(5, failures=10)) == {
        "tasks": 10,
        "passed": 5,
        "errors": 10,
        "inProgress": 0,
        "passRate": "0.5000",
        "meanReward": "0.5000",
    }


def test_nothing_scored_has_no_rate() -> None:
    assert phase_summary(row(0, failures=20)) == {"tasks": 0, "passed": 0, "errors": 20, "inProgress": 0}


@pytest.mark.parametrize(
    ("steps", "signal", "changed"),
    [
        ([step(graded=8, groups_trained=1, grad_norm=0.5)], "ContrastObserved", True),
        ([step(graded=8, groups_constant=2)], "NoRewardContrast", False),
        ([step(graded=0)], "InsufficientEvidence", False),
        ([], "InsufficientEvidence", False),
    ],
)
def test_a_signal_is_what_the_groups_showed(steps: list[StepFinished], signal: str, changed: bool) -> None:
    assert diagnostics(steps) == {"rewardSignal": signal, "weightsChanged": changed}
