"""The bodies of `sandmill env check` and `audit`. In: an environment's reference, a manifest or a run folder. Out: lines, an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import msgspec

from sandmill.config.document import Node, parse_value
from sandmill.config.load import load_manifest
from sandmill.config.manifest import EnvironmentSection, Option
from sandmill.environments import registry
from sandmill.environments.check import Checked, Status, all_tasks, check
from sandmill.errors import ConfigError
from sandmill.reports.audit import audit
from sandmill.reports.inert import inert
from sandmill.reports.metrics import read_run
from sandmill.sandboxes.dual import block_on
from sandmill.sandboxes.images.image import architecture

FAILED: Final = 3
"""The exit code when a task is not sound."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A command line."""

    target: str
    tasks: tuple[str, ...] = ()
    times: int = 1
    cheats: bool = True
    options: tuple[str, ...] = ()


def is_for(target: str) -> bool:
    """Whether the target is a task set that is files, or a manifest."""
    return registry.is_files(target) or (target.endswith((".yaml", ".yml")) and Path(target).is_file())


def run(asked: Asked, *, as_json: bool) -> int:
    """Checks and prints; the exit code is 3 when a task failed. Raises ConfigError, EnvironmentFailed, SandboxError."""
    section = _section(asked)
    environment = registry.get(section.name, section)
    tasks = all_tasks(environment, asked.tasks)
    report = None if as_json else _print
    done = block_on(check(environment, tasks, times=asked.times, cheats=asked.cheats, report=report))
    if as_json:
        tasks_found = {name: msgspec.to_builtins(found) for name, found in done.items()}
        sys.stdout.write(json.dumps({"environment": environment.name, "architecture": architecture(), "tasks": tasks_found}) + "\n")
    else:
        sound = sum(found.status is Status.SOUND for found in done.values())
        sys.stdout.write(f"{sound} of {len(done)} sound on {architecture()}\n")
    return FAILED if any(found.status not in (Status.SOUND, Status.UNKNOWN) for found in done.values()) else 0


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
    passed = [trial for trial in found.trials if trial.passed]
    rest = f": {inert(found.reason, limit=600)}" if found.reason else f" ({len(passed)} of {len(found.trials)} trials passed)"
    print(f"{inert(found.task)}  {found.status.value}{rest}", flush=True)


def _section(asked: Asked) -> EnvironmentSection:
    """The environment's section: of a manifest, or of the reference and the options given. Raises ConfigError."""
    options = dict(_option(text) for text in asked.options)
    if asked.target.endswith((".yaml", ".yml")) and Path(asked.target).is_file():
        section = load_manifest(Path(asked.target)).spec.environment
        return msgspec.structs.replace(section, options={**section.options, **options})
    return EnvironmentSection(name=asked.target, options=options)


def _option(text: str) -> tuple[str, Option]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"it takes KEY=VALUE, not {text[:80]!r}", field="--option")
    found = parse_value(value, "--option").value
    if isinstance(found, list):
        return key, [_member(node) for node in found]
    if found is None or isinstance(found, dict):
        raise ConfigError(f"{key} takes a value or a list such as [a, b], not {value[:80]!r}", field="--option")
    return key, found


def _member(node: Node) -> str | int | float | bool:
    return node.value if isinstance(node.value, str | int | float) else node.text
