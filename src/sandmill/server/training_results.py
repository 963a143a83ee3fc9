"""What a training came to, computed here and not by the trainer. In: rows of its run folder. Out: `summary`, `diagnostics`, figures.

Rates and rewards are decimal strings; what does not exist is left out and never 0. Attempts that the infrastructure failed are counted
as errors and are in no rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from sandmill.rollouts.events import EvaluationFinished, EvaluationPhase, StepFinished, Warned
from sandmill.store import RunFolder, Stream

_NOTES: Final = {
    "Comparable": "both scored the same tasks",
    "SmallestStep": "the change is that of one task, the smallest that these tasks can show",
    "TooFewTasks": "fewer tasks were scored than evaluation.minComparisonTasks asks for",
    "DifferentTasks": "the two did not score the same tasks",
    "IncompleteEvents": "some attempts ended in an infrastructure error, so that their tasks have no score",
    "NonePassed": "no task passed before or after: nothing can be seen",
    "AllPassed": "every task passed before and after: nothing can be seen",
}


class Figures(NamedTuple):
    """A run folder's rows."""

    steps: Sequence[StepFinished]
    before: EvaluationFinished | None
    after: EvaluationFinished | None
    warnings: Sequence[str]


def figures(run: Path) -> Figures:
    """Reads them. Blocks. Raises RunError."""
    folder = RunFolder.open(run)
    rows: list[StepFinished | Warned] = list(folder.rows(Stream.METRICS, StepFinished | Warned))  # type: ignore[arg-type]
    found = {row.phase: row for row in folder.rows(Stream.EVALUATIONS, EvaluationFinished)}
    return Figures(
        steps=[row for row in rows if isinstance(row, StepFinished)],
        before=found.get(EvaluationPhase.BEFORE),
        after=found.get(EvaluationPhase.AFTER),
        warnings=[row.sentence for row in rows if isinstance(row, Warned)],
    )


def phase_summary(row: EvaluationFinished) -> dict[str, Any]:
    """`status.summary.baseline` and `.evaluation`."""
    out: dict[str, Any] = {"tasks": row.graded, "passed": row.passed, "errors": row.failures, "inProgress": 0}
    if row.pass_rate is not None:
        out["passRate"] = f"{row.pass_rate:.4f}"
        out["meanReward"] = f"{sum(task.reward_sum for task in row.tasks) / row.graded:.4f}"
    return out


def comparison(before: EvaluationFinished, after: EvaluationFinished, fewest: int) -> dict[str, Any]:
    """`status.summary.comparison`: whether the two can be compared, and the change in percentage points where they can."""
    scored = [{task.task_id for task in row.tasks if task.graded} for row in (before, after)]
    tasks, change = before.graded, after.passed - before.passed
    if before.failures or after.failures:
        reason = "IncompleteEvents"
    elif scored[0] != scored[1]:
        reason = "DifferentTasks"
    elif tasks < fewest:
        reason = "TooFewTasks"
    elif before.passed + after.passed == 0:
        reason = "NonePassed"
    elif before.passed + after.passed == 2 * tasks:
        reason = "AllPassed"
    else:
        reason = "SmallestStep" if abs(change) == 1 else "Comparable"
    comparable = reason not in ("IncompleteEvents", "DifferentTasks")
    measurable = reason in ("Comparable", "SmallestStep")
    out: dict[str, Any] = {"comparable": comparable, "measurable": measurable, "reason": reason, "note": _NOTES[reason]}
    if comparable and tasks:
        out |= {"changePP": f"{100 * change / tasks:.2f}", "resolutionPP": f"{100 / tasks:.2f}"}
    return out


def summary(found: Figures, fewest: int, *, training: bool) -> dict[str, Any]:
    """`status.summary`. An evaluation alone is made once, before zero steps."""
    if not training:
        return {} if found.before is None else {"evaluation": phase_summary(found.before)}
    out = {name: phase_summary(row) for name, row in (("baseline", found.before), ("evaluation", found.after)) if row is not None}
    if found.before is not None and found.after is not None:
        out["comparison"] = comparison(found.before, found.after, fewest)
    return out


def diagnostics(steps: Sequence[StepFinished]) -> dict[str, Any]:
    """`status.diagnostics`: whether groups differed in their rewards, and whether any update had a gradient."""
    if any(step.groups_trained for step in steps):
        signal = "ContrastObserved"
    elif any(step.graded for step in steps):
        signal = "NoRewardContrast"
    else:
        signal = "InsufficientEvidence"
    return {"rewardSignal": signal, "weightsChanged": any(step.groups_trained and step.grad_norm for step in steps)}


def metrics(step: StepFinished) -> dict[str, Any]:
    """`status.metrics`."""
    out: dict[str, Any] = {"step": step.step, "totalSteps": step.steps}
    for name, value in (("loss", step.loss), ("tokensPerSecond", step.tokens_per_s)):
        if value is not None:
            out[name] = f"{value:.6g}"
    return out
