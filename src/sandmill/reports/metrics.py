"""A run folder in; its steps, evaluations, warnings and costs out, whether the run finished, goes on, or was killed.

Reading never writes and takes no lock. A last line cut short by a kill is skipped; any other row that cannot be read is
counted, never guessed. After a resume the later row of a step or evaluation replaces the earlier one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from sandmill.accounts.ledger import Spend, read_ledger
from sandmill.config.manifest import Manifest
from sandmill.errors import RunError, RunIncompatible
from sandmill.rollouts.events import EpisodeRecord, EvaluationFinished, EvaluationPhase, RunSummary, StepFinished, Warned
from sandmill.rollouts.trajectory import SCHEMA_VERSION
from sandmill.store import FORMAT

T = TypeVar("T")
MAX_LINE = 64 * 2**20
"""Bytes of one row at most; a longer one is counted as unreadable and skipped in constant memory."""


@dataclass(frozen=True, kw_only=True)
class CostLine:
    """What one kind of ledger row came to; None when one of its rows has an unknown price."""

    what: str
    rows: int
    failures: int
    cost_microusd: int | None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run folder says."""

    folder: Path
    manifest: Manifest | None
    steps: tuple[StepFinished, ...]
    evaluations: tuple[EvaluationFinished, ...]
    warnings: tuple[Warned, ...]
    costs: tuple[CostLine, ...]
    summary: RunSummary | None
    unreadable_rows: int
    modified_at: float

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run will have, or None when nothing says so."""
        if self.steps:
            return self.steps[-1].steps
        return self.manifest.spec.parameters.steps if self.manifest is not None else None

    @property
    def finished(self) -> bool:
        """Whether every planned step was made."""
        return bool(self.planned_steps is not None and len(self.steps) > 0 and self.steps[-1].step >= self.planned_steps)

    @property
    def cost_microusd(self) -> int | None:
        """Spent so far; None when unknown."""
        if self.costs:
            return None if any(line.cost_microusd is None for line in self.costs) else sum(line.cost_microusd or 0 for line in self.costs)
        known = [self.summary.cost_microusd] if self.summary is not None else []
        known += [step.cost_microusd for step in self.steps[-1:]]
        return known[0] if known else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One split under one way of sampling, before and after training."""

    split: str
    greedy: bool
    before: EvaluationFinished | None
    after: EvaluationFinished | None


@dataclass
class Rows:
    """Counts what could not be read."""

    unreadable: int = 0


def read_run(folder: Path) -> RunRecord:
    """Everything but the episodes. Raises RunError when `folder` is no run folder, RunIncompatible for another version's."""
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give a run folder such as runs/NAME")
    _require_format(folder)
    rows = Rows()
    metrics: list[StepFinished | Warned] = list(_rows(folder / "metrics.jsonl", StepFinished | Warned, rows))
    evaluations: list[EvaluationFinished] = list(_rows(folder / "evaluations.jsonl", EvaluationFinished, rows))
    steps = {row.step: row for row in metrics if isinstance(row, StepFinished)}
    latest = {(row.split, row.greedy, row.phase, row.step): row for row in evaluations}
    return RunRecord(
        folder=folder,
        manifest=_manifest(folder),
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(latest.values()),
        warnings=tuple({(row.step, row.sentence): row for row in metrics if isinstance(row, Warned)}.values()),
        costs=_costs(folder, rows),
        summary=_optional(folder / "summary.json", RunSummary),
        unreadable_rows=rows.unreadable,  # after every reader above has counted
        modified_at=_modified(folder),
    )


def read_episodes(folder: Path, rows: Rows | None = None) -> Iterator[EpisodeRecord]:
    """The rows of trajectories.jsonl in file order, one in memory at a time."""
    yield from _rows(folder / "trajectories.jsonl", EpisodeRecord, rows or Rows())


def comparisons(record: RunRecord) -> tuple[Comparison, ...]:
    """Every split and way of sampling that was evaluated before or after, in the order of their first evaluation.

    A run that is not finished has no "after"; its latest evaluation in between is not taken for one.
    """
    found: dict[tuple[str, bool], dict[EvaluationPhase, EvaluationFinished]] = {}
    for evaluation in record.evaluations:
        found.setdefault((evaluation.split, evaluation.greedy), {})[evaluation.phase] = evaluation
    return tuple(
        Comparison(split=split, greedy=greedy, before=phases.get(EvaluationPhase.BEFORE), after=_last(phases))
        for (split, greedy), phases in found.items()
        if EvaluationPhase.BEFORE in phases or _last(phases) is not None
    )


def _last(phases: dict[EvaluationPhase, EvaluationFinished]) -> EvaluationFinished | None:
    return phases.get(EvaluationPhase.AFTER) or phases.get(EvaluationPhase.ALONE)


def _rows(path: Path, kind: type[T] | object, rows: Rows) -> Iterator[T]:
    decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
    try:
        with open(path, "rb") as stream:
            for line, complete in _lines(stream, rows):
                try:
                    row = decoder.decode(line)
                except (msgspec.DecodeError, ValueError, RecursionError):
                    rows.unreadable += complete
                    continue
                if getattr(row, "schema_version", SCHEMA_VERSION) == SCHEMA_VERSION:
                    yield row
                else:
                    rows.unreadable += 1
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


def _lines(stream: BinaryIO, rows: Rows) -> Iterator[tuple[bytes, bool]]:
    """Lines without their end, and whether that end was there; blank lines are left out."""
    while line := stream.readline(MAX_LINE):
        complete = line.endswith(b"\n")
        if not complete and len(line) == MAX_LINE:
            rows.unreadable += 1
            while (line := stream.readline(MAX_LINE)) and not line.endswith(b"\n"):
                continue
        elif line.strip():
            yield line.rstrip(b"\n"), complete


def _require_format(folder: Path) -> None:
    try:
        found = (folder / "format").read_text("utf-8", "replace").strip()[:80]
    except OSError:
        raise RunError(f"{folder} is not a run folder: it has no file named format") from None
    if found != FORMAT:
        raise RunIncompatible(
            f"{folder} was written in format {found!r}, this is format {FORMAT!r}; read it with the Sandmill that wrote it"
        )


def _manifest(folder: Path) -> Manifest | None:
    return _optional(folder / "manifest.json", Manifest)


def _optional(path: Path, kind: type[T]) -> T | None:
    """A whole JSON file, or None when it is missing or of another shape."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def _costs(folder: Path, rows: Rows) -> tuple[CostLine, ...]:
    """The ledger's sums by activity, rows before the first unreadable one; attempts that failed are in them."""
    sums: dict[str, Spend] = {}
    failed: Counter[str] = Counter()
    try:
        for row in read_ledger(folder / "ledger.jsonl"):
            sums[row.activity.value] = sums.get(row.activity.value, Spend()).plus(row)
            failed[row.activity.value] += row.outcome in ("infrastructure-failure", "failed", "refused")
    except FileNotFoundError:
        return ()
    except (RunIncompatible, OSError):
        rows.unreadable += 1
    return tuple(
        CostLine(what=what, rows=sums[what].rows, failures=failed[what], cost_microusd=sums[what].microusd) for what in sorted(sums)
    )


def _modified(folder: Path) -> float:
    times = [entry.stat().st_mtime for entry in os.scandir(folder) if entry.name.endswith((".jsonl", ".json"))]
    return max(times, default=0.0)
