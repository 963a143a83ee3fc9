"""`sandmill env list|add|show|check|run|rm|prune|init`: a command line in; environments installed, described, tried and removed."""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from sandmill.config.document import Node, parse_value
from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import foreign, registered, registry
from sandmill.environments.environment import Environment
from sandmill.environments.formats import FORMATS, is_foreign
from sandmill.environments.grading import grade_episode
from sandmill.environments.packages import install
from sandmill.environments.soundness import check_answers
from sandmill.environments.task import InfrastructureFailure, Submission, Task
from sandmill.errors import ConfigError, EnvironmentFailed, UnknownEnvironment
from sandmill.reports.inert import inert, inert_block
from sandmill.reports.words import duration, size
from sandmill.sandboxes.images import store

R = TypeVar("R")
_SHOWN_TASKS: Final = 50
_LONGEST_PROMPT: Final = 2000
_TIMEOUT_S: Final = 600.0
_EXAMPLE: Final = '''"""A small environment: sums. tasks(split) gives rows, reward(completion, answer) grades; see docs/environments.md.

What it needs beyond Python's own library is named here, pinned, and installed in its own sandbox:

# /// script
# dependencies = []
# ///
"""

import random

SPLITS = ("train", "heldout")


def tasks(split):
    """Rows of a split, with prompt and answer. An identity (here the prompt) must never be in two splits."""
    chance = random.Random(split)
    low, high = (10, 54) if split == "train" else (55, 99)
    for _ in range(2000 if split == "train" else 500):
        left, right = chance.randint(low, high), chance.randint(low, high)
        yield {"prompt": f"What is {left} + {right}? Answer with the number only.", "answer": str(left + right)}


def reward(completion, answer):
    """1.0 for the right number. None means that there was no answer; raise what should count as nobody's fault."""
    if not completion.strip():
        return None
    return 1.0 if completion.strip().rstrip(".") == answer else 0.0
'''


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The environment that a command line names."""

    reference: str
    section: EnvironmentSection

    @classmethod
    def of(cls, reference: str, options: Sequence[str] | None, *, seed: int = 42, tasks: int = _SHOWN_TASKS) -> Wanted:
        """From the words of a command line. Raises ConfigError naming the option."""
        found = dict(_option(text) for text in options or ())
        try:
            section = msgspec.convert(
                {"name": reference, "trainTasks": tasks, "heldOutTasks": tasks, "seed": seed, "options": found}, EnvironmentSection
            )
        except msgspec.ValidationError as error:
            raise ConfigError(f"{error}", field="--option") from None
        return cls(reference=reference, section=section)

    def load(self, *, quiet: bool = False) -> Environment:
        """The environment, with fewer tasks where it has fewer."""
        report = (lambda line: None) if quiet else (lambda line: print(inert(line, limit=200), file=sys.stderr, flush=True))
        entry = registered.find(self.reference)
        if entry is not None:
            return registered.load(entry, self.section, report, fit=True)
        if not is_foreign(self.reference):
            return registry.get(self.reference, self.section)
        return foreign.load(self.reference, self.section, report, fit=True)


def list_environments(*, as_json: bool) -> int:
    """Prints what can be named and what is installed."""
    found = sorted(install.records().items(), key=lambda pair: -pair[1].created_s)
    if as_json:
        known = {"builtin": sorted(registry.BUILTIN), "formats": sorted(FORMATS), "named": msgspec.to_builtins(registered.registered())}
        sys.stdout.write(json.dumps({**known, "installed": [_record(key, one) for key, one in found]}, ensure_ascii=True) + "\n")
        return 0
    sys.stdout.write(
        f"built in   {', '.join(sorted(registry.BUILTIN))}\nformats    {', '.join(f'{name}/...' for name in sorted(FORMATS))}\n"
    )
    for named in registered.registered():
        digest = named.digest.removeprefix("sha256:")[:12]
        sys.stdout.write(f"named      {named.name}@{named.version}  {inert(named.reference, limit=100)}  {digest}\n")
    if not found:
        return 0
    rows = [("installed", "key", "python", "wheels", "size", "since")]
    for key, one in found:
        names = inert(
            ", ".join(one.references[:3]) + (f" and {len(one.references) - 3} more" if len(one.references) > 3 else ""), limit=100
        )
        since = f"{duration(max(0.0, time.time() - one.created_s))} ago"
        rows.append((names or "-", key[:12], one.python, str(len(one.wheels)), size(one.bytes), since))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sys.stdout.write(
        "\n" + "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)
    )
    return 0


def show(wanted: Wanted, *, examples: int, name: str | None = None, as_json: bool) -> int:
    """Prints what an environment is, and gives it a name. Raises ConfigError for a name that is taken."""
    environment = wanted.load(quiet=as_json)
    if name is not None and not isinstance(environment, foreign.ForeignEnvironment):
        raise ConfigError(f"{wanted.reference} has a name of its own; only those of a format are given one", field="--as")

    async def work() -> dict[str, Any]:
        try:
            if name is not None and isinstance(environment, foreign.ForeignEnvironment):
                entry = registered.register(name, environment, wanted.section)
                environment.name, environment.version = entry.name, entry.version
            return _described(environment, examples)
        finally:
            await _closed(environment)

    found = _waited(work())
    if as_json:
        sys.stdout.write(json.dumps(found, ensure_ascii=True) + "\n")
        return 0
    prompts = found.pop("examples")
    width = max(len(key) for key in found)
    for key, value in found.items():
        text = (
            ", ".join(f"{name} {count}" for name, count in value.items())
            if isinstance(value, dict)
            else ", ".join(value)
            if isinstance(value, list)
            else str(value)
        )
        sys.stdout.write(f"{key.ljust(width)}  {inert(text, limit=300) or '-'}\n")
    for one in prompts:
        sys.stdout.write(f"\n{inert(one['id'])}\n{inert_block(one['prompt'], limit=_LONGEST_PROMPT)}\n")
    return 0


def check(wanted: Wanted, *, repeats: int, as_json: bool) -> int:
    """Checks some tasks' graders. Raises EnvironmentFailed when one is unsound."""
    environment = wanted.load(quiet=as_json)
    tasks = [task for name in ("train", "heldout") for task in environment.splits[name][: wanted.section.train_tasks]]

    async def work() -> Any:
        try:
            return await check_answers(environment, tasks, repeats=repeats)
        finally:
            await _closed(environment)

    found = _waited(work())
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found), ensure_ascii=True) + "\n")
    else:
        for one in found.findings:
            sys.stdout.write(f"{inert(one.task)}  {one.fault}  {inert(one.said, limit=200)}\n")
        unknown = f", {found.unanswered} of them without an answer of their own" if found.unanswered else ""
        sys.stdout.write(f"{found.tasks} tasks checked{unknown}; {len(found.findings)} faults\n")
    if found.findings:
        raise EnvironmentFailed(f"{len({one.task for one in found.findings})} of {found.tasks} tasks are not sound; see above")
    return 0


def run(wanted: Wanted, id: str | None, answer: str | None, *, expected: bool, as_json: bool) -> int:
    """Grades one answer to one task, or shows the task. Raises EnvironmentFailed where the grader broke."""
    environment = wanted.load(quiet=as_json)
    task = _task(environment, id)
    given = sys.stdin.read() if answer == "-" else answer
    if expected:
        own = getattr(environment, "expected_answer", lambda task: None)
        given = own(task)
        if given is None:
            raise ConfigError(f"{wanted.reference} knows no answer to {task.id}; give one with --answer", field="--expected")

    async def work() -> Any:
        try:
            return None if given is None else await grade_episode(environment, task, Submission(answer=given), None, timeout_s=_TIMEOUT_S)
        finally:
            await _closed(environment)

    verdict = _waited(work())
    shown = {"task": task.id, "prompt": task.prompt, "answer": given, "verdict": msgspec.to_builtins(verdict)}
    if as_json:
        sys.stdout.write(json.dumps(shown, ensure_ascii=True) + "\n")
    else:
        sys.stdout.write(f"{inert(task.id)}\n{inert_block(task.prompt, limit=_LONGEST_PROMPT)}\n")
        if verdict is not None and not isinstance(verdict, InfrastructureFailure):
            parts = "".join(f"\n  {inert(name, limit=80)}  {part:g}" for name, part in verdict.parts.items())
            sys.stdout.write(f"\nreward {verdict.reward:g}, {'passed' if verdict.passed else 'not passed'}{parts}\n")
    if isinstance(verdict, InfrastructureFailure):
        raise EnvironmentFailed(f"no verdict on {task.id}: {verdict.reason}")
    return 0


def remove(names: Sequence[str]) -> int:
    """Removes names, and installed packages by key or by a reference that needed them. Raises UnknownEnvironment, ImageError."""
    for name in names:
        if registered.forget(name):
            sys.stdout.write(f"removed the name {inert(name, limit=100)}; what it meant is still installed\n")
            continue
        found = [key for key, one in install.records().items() if (key.startswith(name) and len(name) >= 6) or name in one.references]
        if not found:
            known = {one for record in install.records().values() for one in record.references}
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            raise UnknownEnvironment(
                f"nothing is installed for {inert(name, limit=100)!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        before = store().total_bytes()
        for key in found:
            install.remove(key)
        sys.stdout.write(f"removed {inert(name, limit=100)}, {size(max(0, before - store().total_bytes()))} freed\n")
    return 0


def prune() -> int:
    """Removes what no sandbox uses."""
    before, removed = store().total_bytes(), 0
    in_use = {name for stored in store().list() if stored.in_use for name in stored.names}
    for key in install.records():
        if f"{install.NAMES}{key}" not in in_use:
            install.remove(key)
            removed += 1
    sys.stdout.write(f"removed {removed} installed packages, {size(max(0, before - store().total_bytes()))} freed\n")
    return 0


def init(folder: Path) -> int:
    """Writes the example. Raises ConfigError where something is in its way."""
    place = folder / "environment.py"
    if place.exists():
        raise ConfigError("exists already; name another folder", file=place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place.write_text(_EXAMPLE, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=place) from None
    where = inert(str(folder), limit=200)
    sys.stdout.write(f"wrote {inert(str(place), limit=200)}; try it:\n")
    sys.stdout.write(f"  sandmill env check python/{where}\n  sandmill env run python/{where} --answer 42\n")
    return 0


def _described(environment: Environment, examples: int) -> dict[str, Any]:
    found: dict[str, Any] = {"name": environment.name, "version": environment.version, "digest": environment.digest}
    found["tasks"] = {name: len(tasks) for name, tasks in environment.splits.items()}
    if isinstance(environment, foreign.ForeignEnvironment):
        own, record = environment.description, environment.installed.record
        found["tasks"] = {name: "without end" if count is None else count for name, count in own.splits.items()}
        found |= {"licence": own.licence, "reward": own.reward, "python": record.python}
        found["requirements"] = [*record.package.requirements, *record.package.bare, *record.package.local]
        found |= {"wheels": len(record.wheels), "bytes": record.bytes}
    shown = environment.splits["train"][:examples]
    return {**found, "examples": [{"id": task.id, "prompt": task.prompt} for task in shown]}


def _task(environment: Environment, id: str | None) -> Task:
    tasks = {task.id: task for split in environment.splits.values() for task in split}
    if id is None:
        return next(iter(environment.splits["train"] or tasks.values()))
    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, n=1, cutoff=0.0)
        raise ConfigError(f"there is no task {ascii(id)[:80]}; the nearest is {near[0]}", field="--task")
    return tasks[id]


def _record(key: str, record: install.Record) -> dict[str, Any]:
    found: dict[str, Any] = {"key": key, **msgspec.to_builtins(record)}
    return found


def _option(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"it is KEY=VALUE, not {text[:80]!r}", field="--option")
    return key, _plain(parse_value(value, f"--option {key}"))


def _plain(node: Node) -> Any:
    if isinstance(node.value, list):
        return [_plain(inner) for inner in node.value]
    return {key: _plain(inner) for key, inner in node.value.items()} if isinstance(node.value, dict) else node.value


async def _closed(environment: Environment) -> None:
    close = getattr(environment, "close", None)
    if close is not None:
        await close()


def _waited(work: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(work)
