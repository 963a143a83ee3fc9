"""Does the demo learn, and from the reward alone? Seeds, a control with random rewards and one with flipped rewards.

Each seed draws its own words, folders, demonstrations and weights. The controls start from the first seed's warm-started model.
`heldout` is the split that no recipe was chosen on: its words never occur in reinforcement learning, its phrasings nowhere else.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sandmill.config.load import load_manifest
from sandmill.reports.intervals import evaluation_interval
from sandmill.reports.metrics import read_run
from sandmill.rollouts.events import EvaluationFinished, EvaluationPhase, Event, StepFinished
from sandmill.training.synchronous import train

MANIFEST = Path(__file__).parent.parent / "examples" / "shell-tiny.yaml"
console = Console(stderr=True)


@dataclass(frozen=True)
class Trial:
    """One run to make. `base`: a model folder to start from instead of a warm start."""

    name: str
    seed: int
    reward: str = "task"
    base: Path | None = None


class Line:
    """A listener that shows one line per ten steps."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished) and event.step % 10 == 0:
            console.print(f"{self.name}: step {event.step}/{event.steps}, pass rate {event.pass_rate}")

    def should_stop(self) -> bool:
        return False


def make(trial: Trial, folder: Path, manifest: Path, steps: int | None) -> list[EvaluationFinished]:
    """Makes the run and returns its evaluations before and after."""
    overrides = [
        f"spec.parameters.seed={trial.seed}",
        f"spec.warmStart.seed={trial.seed}",
        f"spec.environment.seed={42 + trial.seed}",
        f"spec.parameters.reward={trial.reward}",
        "spec.evaluation.every=0",
    ]
    if steps is not None:
        overrides.append(f"spec.parameters.steps={steps}")
    if trial.base is not None:
        overrides += [f"spec.model.uri={trial.base}", "spec.warmStart.steps=0"]
    train(load_manifest(manifest, overrides), folder, resume=False, listener=Line(trial.name))
    return [row for row in read_run(folder).evaluations if row.phase is not EvaluationPhase.DURING]


def rows_of(trial: Trial, evaluations: Sequence[EvaluationFinished]) -> list[dict[str, object]]:
    """Plain figures, one per evaluated split and way of sampling."""
    rows: list[dict[str, object]] = []
    for row in evaluations:
        interval = evaluation_interval(row)
        rows.append(
            {
                "trial": trial.name,
                "split": row.split,
                "sampling": "greedy" if row.greedy else "sampled",
                "phase": str(row.phase),
                "pass_rate": row.pass_rate,
                "low": None if interval is None else interval.low,
                "high": None if interval is None else interval.high,
                "graded": row.graded,
                "failures": row.failures,
            }
        )
    return rows


def main(
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Steps instead of the manifest's.")] = None,
    controls: Annotated[bool, typer.Option(help="Also run random and flipped rewards.")] = True,
    manifest: Annotated[Path, typer.Option(help="Which manifest.")] = MANIFEST,
    keep: Annotated[Path | None, typer.Option(help="Keep the run folders here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Runs the trials and prints pass rates with 95 % intervals."""
    with tempfile.TemporaryDirectory(prefix="sandmill-learning-") as temporary:
        root = keep or Path(temporary)
        trials = [Trial(f"seed {seed}", seed) for seed in range(seeds)]
        if controls:
            base = root / "seed-0" / "base"
            trials += [Trial("random rewards", 0, "random", base), Trial("flipped rewards", 0, "flipped", base)]
        rows = [row for trial in trials for row in rows_of(trial, make(trial, root / trial.name.replace(" ", "-"), manifest, steps))]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("trial", "split", "sampling", "phase", "pass rate", "95 % interval", "graded", "failures")
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("trial", "split", "sampling", "phase")),
            "-" if row["pass_rate"] is None else f"{row['pass_rate']:.3f}",
            "-" if row["low"] is None else f"{row['low']:.3f} - {row['high']:.3f}",
            str(row["graded"]),
            str(row["failures"]),
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
