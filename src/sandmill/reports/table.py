"""A run's record in; the summary that ends `train`, `eval` and `report` in a terminal out."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from sandmill.config.allowed import allowed
from sandmill.reports.breakdown import STEP_LABELS, shares, total_seconds
from sandmill.reports.console import PlainConsole
from sandmill.reports.inert import inert
from sandmill.reports.intervals import evaluation_interval, paired_difference
from sandmill.reports.metrics import RunRecord, comparisons
from sandmill.reports.words import dollars, duration, interval_words, number, percent, size
from sandmill.rollouts.events import EvaluationPhase


class SplitSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One split under one way of sampling; rates are None where nothing was graded, intervals are 95 %."""

    split: str
    greedy: bool
    before: float | None
    before_interval: tuple[float, float] | None
    after: float | None
    after_interval: tuple[float, float] | None
    change: float | None
    change_interval: tuple[float, float] | None
    tasks: int
    failures: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    run: str
    report: str
    steps_done: int
    steps_planned: int | None
    finished: bool
    splits: tuple[SplitSummary, ...]
    training_seconds: float
    seconds_per_step: float | None
    tokens_per_s: float | None
    sampled_tokens: int
    episodes: int
    failures: int
    cost_microusd: int | None
    peak_rss_bytes: int | None
    warnings: int
    unreadable_rows: int


def summarise(record: RunRecord, *, report: Path) -> Summary:
    """The figures of the summary."""
    steps = record.steps
    seconds = math.fsum(step.wall_s for step in steps)
    tokens = sum(step.sampled_tokens for step in steps)
    return Summary(
        run=str(record.folder),
        report=str(report),
        steps_done=steps[-1].step if steps else 0,
        steps_planned=record.planned_steps,
        finished=record.finished,
        splits=split_summaries(record),
        training_seconds=seconds,
        seconds_per_step=seconds / len(steps) if steps else None,
        tokens_per_s=tokens / seconds if seconds > 0 else None,
        sampled_tokens=tokens,
        episodes=sum(step.episodes for step in steps),
        failures=sum(step.failures for step in steps) + sum(evaluation.failures for evaluation in record.evaluations),
        cost_microusd=record.cost_microusd,
        peak_rss_bytes=record.summary.peak_rss_bytes if record.summary is not None else None,
        warnings=len(record.warnings),
        unreadable_rows=record.unreadable_rows,
    )


def split_summaries(record: RunRecord) -> tuple[SplitSummary, ...]:
    """Before, after and the paired change of every split and way of sampling."""
    rows = []
    for pair in comparisons(record):
        before = evaluation_interval(pair.before) if pair.before is not None else None
        after = evaluation_interval(pair.after) if pair.after is not None else None
        change = paired_difference(pair.before, pair.after) if pair.before is not None and pair.after is not None else None
        made = [evaluation for evaluation in (pair.before, pair.after) if evaluation is not None]
        rows.append(
            SplitSummary(
                split=pair.split,
                greedy=pair.greedy,
                before=before.rate if before is not None else None,
                before_interval=(before.low, before.high) if before is not None else None,
                after=after.rate if after is not None else None,
                after_interval=(after.low, after.high) if after is not None else None,
                change=change.rate if change is not None else None,
                change_interval=(change.low, change.high) if change is not None else None,
                tasks=max(len(evaluation.tasks) for evaluation in made),
                failures=sum(evaluation.failures for evaluation in made),
            )
        )
    return tuple(rows)


def print_summary(record: RunRecord, *, report: Path, console: Console | None = None) -> None:
    """Prints the table of splits and a few lines of figures."""
    console = console or PlainConsole()
    summary = summarise(record, report=report)
    if comparisons(record):
        console.print(Text("held-out pass rate, 95 % intervals", style="bold"))
        for row in _split_rows(record):
            console.print(Text(row))
    for line in _figures(record, summary):
        console.print(Text(line))
    console.print(Text(f"report  {inert(str(report))}", style="bold"))


def _split_rows(record: RunRecord) -> list[str]:
    """Aligned columns of whole words: a narrow terminal wraps them, nothing is cut. Without training there is no before and after."""
    alone = all(evaluation.phase is EvaluationPhase.ALONE for evaluation in record.evaluations)
    rows = [["split", "sampling", *(["pass rate"] if alone else ["before", "after", "change"]), "failures"]]
    for pair in comparisons(record):
        before = evaluation_interval(pair.before) if pair.before is not None else None
        after = evaluation_interval(pair.after) if pair.after is not None else None
        change = paired_difference(pair.before, pair.after) if pair.before is not None and pair.after is not None else None
        failures = sum(evaluation.failures for evaluation in (pair.before, pair.after) if evaluation is not None)
        told = [interval_words(before), interval_words(after), interval_words(change, signed=True)]
        way = "greedy" if pair.greedy else "sampled"
        rows.append([inert(pair.split, limit=40), way, *(told[1:2] if alone else told), str(failures)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _figures(record: RunRecord, summary: Summary) -> list[str]:
    lines = []
    if record.steps:
        planned = f" of {summary.steps_planned}" if summary.steps_planned is not None else ""
        speed = f"{number(summary.seconds_per_step)} s a step, {number(summary.tokens_per_s, 0)} sampled tokens/s"
        lines.append(
            f"steps   {summary.steps_done}{planned} in {duration(summary.training_seconds)}, {speed}, {summary.episodes:,} episodes"
        )
        parts = shares(total_seconds(record.steps))
        lines.append("time    " + ", ".join(f"{STEP_LABELS[key]} {percent(share)}" for key, share in parts.items() if share >= 0.005))
    failed = f", {summary.failures} episodes failed for reasons of the infrastructure (in no rate)" if summary.failures else ""
    memory = f", peak memory {size(summary.peak_rss_bytes)}" if summary.peak_rss_bytes else ""
    lines.append(f"cost    {dollars(summary.cost_microusd)}{memory}{failed}")
    if record.manifest is not None:
        lines += [inert(f"graders could {what}", limit=400) for what in allowed(record.manifest.spec)]
    if summary.warnings:
        lines.append(f"notes   {summary.warnings} warnings, see the report")
    if summary.unreadable_rows:
        lines.append(f"notes   {summary.unreadable_rows} rows of the run folder could not be read and are left out")
    return lines
