"""A run's record in; the plain data that report.html draws from out. Every foreign string is inert before it enters."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import msgspec

from sandmill.config.quantities import format_usd
from sandmill.reports.breakdown import EPISODE_LABELS, STEP_LABELS, step_seconds
from sandmill.reports.excerpt import Excerpt
from sandmill.reports.halves import Halves
from sandmill.reports.inert import inert, inert_block
from sandmill.reports.intervals import Interval, evaluation_interval, paired_difference, pass_at_k
from sandmill.reports.metrics import CostLine, RunRecord, comparisons
from sandmill.reports.table import Summary
from sandmill.reports.words import dollars, size
from sandmill.rollouts.events import EvaluationFinished, EvaluationPhase, StepFinished, TaskOutcome

MAX_WARNINGS = 200
MAX_TASKS = 40
"""Tasks compared half by half on the page."""
MAX_STEPS = 5000
"""Steps drawn at most; beyond, every n-th is."""


def page_data(record: RunRecord, summary: Summary, excerpt: Excerpt, halves: Halves) -> dict[str, object]:
    """Everything the page shows, ready for `script_json`."""
    steps = record.steps[:: 1 + len(record.steps) // MAX_STEPS]
    return {
        "run": _run(record),
        "figures": _figures(summary),
        "warnings": [inert(text, limit=400) for text in _warnings(record)],
        "evaluations": [_evaluation(record, index) for index in range(len(comparisons(record)))],
        "alone": all(evaluation.phase is EvaluationPhase.ALONE for evaluation in record.evaluations),
        "marks": _marks(record),
        "halves": _halves(halves),
        "steps": _steps(steps),
        "parts": [{"key": key, "label": label} for key, label in STEP_LABELS.items()],
        "episode_parts": [{"key": key, "label": label} for key, label in EPISODE_LABELS.items()],
        "episode_seconds": [_number(value) for value in excerpt.mean_seconds],
        "episode_count": excerpt.trained,
        "episode_total": excerpt.total,
        "timelines": [dict(timeline) for timeline in excerpt.timelines],
        "episodes": [dict(episode) for episode in excerpt.episodes],
        "vocabulary": dict(excerpt.vocabulary),
        "costs": [_cost(line) for line in record.costs],
        "configuration": _configuration(record),
    }


def _run(record: RunRecord) -> dict[str, object]:
    done, planned = (record.steps[-1].step if record.steps else 0), record.planned_steps
    spec = record.manifest.spec if record.manifest is not None else None
    evaluated = not record.steps and any(evaluation.phase is EvaluationPhase.ALONE for evaluation in record.evaluations)
    return {
        "name": inert(record.name, limit=120),
        "finished": record.finished,
        "status": "evaluation" if evaluated else f"step {done} of {planned}" if planned is not None else f"step {done}",
        "environment": inert(spec.environment.name, limit=120) if spec is not None else None,
        "model": inert(spec.model.uri, limit=200) if spec is not None else None,
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.modified_at)) if record.modified_at else None,
    }


def _figures(summary: Summary) -> dict[str, object]:
    return {
        "steps_done": summary.steps_done,
        "steps_planned": summary.steps_planned,
        "training_seconds": summary.training_seconds or None,
        "seconds_per_step": _number(summary.seconds_per_step),
        "tokens_per_s": _number(summary.tokens_per_s),
        "episodes": summary.episodes,
        "failures": summary.failures,
        "cost": dollars(summary.cost_microusd),
        "peak_memory": size(summary.peak_rss_bytes) if summary.peak_rss_bytes else None,
    }


def _warnings(record: RunRecord) -> list[str]:
    sentences = [f"step {row.step}: {row.sentence}" if row.step is not None else row.sentence for row in record.warnings[:MAX_WARNINGS]]
    if record.unreadable_rows:
        sentences.append(f"{record.unreadable_rows} rows of the run folder could not be read and are left out.")
    if record.manifest is None:
        sentences.append("manifest.json is missing or cannot be read, so the configuration is unknown.")
    return sentences


def _evaluation(record: RunRecord, index: int) -> dict[str, object]:
    pair = comparisons(record)[index]
    made = [evaluation for evaluation in (pair.before, pair.after) if evaluation is not None]
    change = paired_difference(pair.before, pair.after) if pair.before is not None and pair.after is not None else None
    return {
        "split": inert(pair.split, limit=60),
        "greedy": pair.greedy,
        "samples": max(evaluation.samples_per_task for evaluation in made),
        "before": _measured(pair.before),
        "after": _measured(pair.after),
        "change": _interval(change),
        "failures": sum(evaluation.failures for evaluation in made),
    }


def _measured(evaluation: EvaluationFinished | None) -> dict[str, object] | None:
    interval = _interval(evaluation_interval(evaluation)) if evaluation is not None else None
    if evaluation is None or interval is None:
        return None
    k = evaluation.samples_per_task
    counts = {"passed": evaluation.passed, "graded": evaluation.graded, "tasks": len(evaluation.tasks)}
    return {**interval, **counts, "k": k, "pass_at_k": _number(pass_at_k(evaluation.tasks, k)) if k > 1 else None}


def _interval(interval: Interval | None) -> dict[str, object] | None:
    return None if interval is None else {"rate": round(interval.rate, 6), "low": round(interval.low, 6), "high": round(interval.high, 6)}


def _marks(record: RunRecord) -> list[object]:
    """Sampled held-out evaluations, as points over the training curve."""
    marks: list[object] = []
    for evaluation in record.evaluations:
        interval = _interval(evaluation_interval(evaluation))
        if interval is None or evaluation.greedy or evaluation.phase is EvaluationPhase.ALONE:
            continue
        split = inert(evaluation.split, limit=60)
        name = f"{split} after step {evaluation.step}"
        marks.append({**interval, "split": split, "step": evaluation.step, "name": name})
    return marks


def _halves(halves: Halves) -> dict[str, object]:
    """The tasks that changed most, and the change over all."""
    tasks = [task for task in halves.tasks if task.change is not None]
    return {
        "change": _interval(halves.change),
        "tasks": len(tasks),
        "one_half_only": len(halves.tasks) - len(tasks),
        "rows": [
            {"title": inert(task.title, limit=90), "first": _half(task.first), "second": _half(task.second)} for task in tasks[:MAX_TASKS]
        ],
    }


def _half(half: TaskOutcome) -> dict[str, object]:
    return {"passed": half.passed, "graded": half.graded, "rate": round(half.passed / half.graded, 6), "failures": half.failures}


def _steps(steps: Sequence[StepFinished]) -> dict[str, object]:
    return {
        "step": [step.step for step in steps],
        "reward": [_number(step.reward) for step in steps],
        "pass": [_number(step.pass_rate) for step in steps],
        "passed": [step.passed for step in steps],
        "graded": [step.graded for step in steps],
        "failures": [step.failures for step in steps],
        "entropy": [_number(step.entropy) for step in steps],
        "grad_norm": [_number(step.grad_norm) for step in steps],
        "kl": [_number(step.kl_sampler) for step in steps],
        "parts": [[_number(value) for value in step_seconds(step).values()] for step in steps],
    }


def _cost(line: CostLine) -> dict[str, object]:
    return {
        "what": inert(line.what, limit=80),
        "rows": line.rows,
        "failures": line.failures,
        "cost": format_usd(line.cost_microusd, decimals=4),
    }


def _configuration(record: RunRecord) -> str | None:
    if record.manifest is None:
        return None
    return inert_block(json.dumps(json.loads(msgspec.json.encode(record.manifest)), indent=2, ensure_ascii=False))


def _number(value: float | None) -> float | None:
    """A finite number of seven digits, or None: JSON has neither NaN nor infinity."""
    return None if value is None or value != value or abs(value) == float("inf") else float(f"{value:.7g}")
