"""The bodies of `sandmill env check` and `audit`. In: an environment's reference, a manifest or a run folder. Out: lines, an exit code."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from sandmill.cli.environment import Wanted, closed
from sandmill.cli.installing import Tell, quiet, telling
from sandmill.config.load import load_manifest
from sandmill.environments import registry
from sandmill.environments.attempts import Kind
from sandmill.environments.check import FAILED, Checked, Status, all_tasks, check
from sandmill.environments.environment import Environment
from sandmill.environments.packages.install import Report
from sandmill.environments.task import Task
from sandmill.reports.audit import audit
from sandmill.reports.inert import inert
from sandmill.reports.metrics import read_run
from sandmill.sandboxes.dual import block_on
from sandmill.sandboxes.images.image import architecture

FAILURES: Final = 3
"""The exit code when a task failed."""
PER_SPLIT: Final = 8


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A command line. `target`: a reference, or the path of a manifest. `per_split` None: 8 of packages, else all."""

    target: str
    per_split: int | None = None
    tasks: tuple[str, ...] = ()
    times: int = 1
    cheats: bool = True
    options: tuple[str, ...] = ()
    grading: Path | None = None
    seed: int = 42


def run(asked: Asked, *, as_json: bool) -> int:
    """Checks and prints; the exit code is 3 when a task failed. Raises ConfigError, EnvironmentFailed, SandboxError."""
    with telling(silent=as_json) as (stage, progress):
        environment = _environment(asked, stage)
        tasks = _tasks(asked, environment)
        stage(f"checking {environment.name}: 0 of {len(tasks)} tasks")
        done = block_on(_checked(environment, tasks, asked, quiet if as_json else _print, progress))
    if as_json:
        tasks_found = {name: msgspec.to_builtins(found) for name, found in done.items()}
        sys.stdout.write(json.dumps({"environment": environment.name, "architecture": architecture(), "tasks": tasks_found}) + "\n")
    else:
        counts = Counter(found.status for found in done.values())
        others = "".join(f", {counts[status]} {status.value}" for status in Status if status is not Status.SOUND and counts[status])
        sys.stdout.write(f"{counts[Status.SOUND]} of {len(done)} sound on {architecture()}{others}\n")
    return FAILURES if any(found.status in FAILED for found in done.values()) else 0


async def _checked(
    environment: Environment, tasks: Sequence[Task], asked: Asked, show: Callable[[Checked], None], progress: Tell
) -> dict[str, Checked]:
    done = itertools.count(1)

    def report(found: Checked) -> None:
        progress(f"checking {environment.name}: {next(done)} of {len(tasks)} tasks")
        show(found)

    try:
        return await check(environment, tasks, times=asked.times, cheats=asked.cheats, report=report)
    finally:
        await closed(environment)


def _environment(asked: Asked, report: Report) -> Environment:
    """A manifest's, as a run would have it; or that of a reference, with fewer tasks where it has fewer. Raises ConfigError."""
    if not _is_manifest(asked.target):
        wanted = Wanted.of(asked.target, asked.options, grading=asked.grading, seed=asked.seed, tasks=asked.per_split or PER_SPLIT)
        return wanted.load(report)
    spec = load_manifest(Path(asked.target)).spec
    wanted = Wanted.of(spec.environment.name, asked.options, grading=asked.grading or Path(asked.target))
    section = msgspec.structs.replace(spec.environment, options={**spec.environment.options, **wanted.section.options})
    return registry.get(section.name, section, report, wanted.access)


def _tasks(asked: Asked, environment: Environment) -> tuple[Task, ...]:
    if asked.tasks or asked.per_split is None:
        return all_tasks(environment, asked.tasks)
    return tuple(task for tasks in environment.splits.values() for task in tasks[: asked.per_split])


def _is_manifest(target: str) -> bool:
    return target.endswith((".yaml", ".yml")) and Path(target).is_file()


def print_audit(run: Path, *, as_json: bool) -> int:
    """Prints the audit of a run; the exit code is 0. Raises RunError when `run` is no run folder."""
    read_run(run)
    found = audit(run)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found)) + "\n")
        return 0
    for one in found.touched:
        names = ", ".join(f"command {number + 1}: {name}" for number, name in one.commands)
        sys.stdout.write(f"step {one.step}  {inert(one.split)}  {inert(one.task)}  episode {inert(one.group)}/{one.index}  {names}\n")
    lost = f"; {found.unreadable_rows} rows could not be read" if found.unreadable_rows else ""
    sys.stdout.write(f"{len(found.touched)} of {found.solved} solved episodes named something of the grader's{lost}\n")
    return 0


def _print(found: Checked) -> None:
    counts = []
    for kind, name in ((Kind.SOLUTION, "solution"), (Kind.NOTHING, "no work"), (Kind.CHEAT, "cheats")):
        trials = [trial for trial in found.trials if trial.kind is kind]
        counts.append(f"{name} {sum(trial.passed for trial in trials)}/{len(trials)}" if trials else f"{name} -")
    why = f": {inert(found.reason, limit=600)}" if found.reason else ""
    print(f"{inert(found.task)}  {found.status.value}  {', '.join(counts)}{why}", flush=True)
