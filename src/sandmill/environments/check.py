"""Whether tasks can be trusted. In: an environment and tasks of it. Out: per task, whether its reference solution passes every time, and
nothing else does; kept by architecture, and asked for before training.

    <state>/checks/<digest of the task>/<architecture>.json
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from sandmill.config.check import nearest
from sandmill.environments.attempts import Kind, Trial, answer_trials, machine_trials
from sandmill.environments.environment import Environment
from sandmill.environments.handover import Digested, Rehearsed
from sandmill.environments.task import Task
from sandmill.errors import ConfigError
from sandmill.sandboxes.backends.native.state import state_root
from sandmill.sandboxes.images.image import architecture

_AT_ONCE: Final = 8
"""Questions that are checked at once; machines are checked one after the other."""


class Status(enum.StrEnum):
    """What a check of one task came to."""

    SOUND = "sound"
    """The reference solution passed every time, and nothing else ever did."""
    FLAKY = "flaky"
    """The reference solution passed some of the times, or the same answer got different rewards."""
    BROKEN = "broken"
    """The reference solution never passed, or something could not be graded."""
    FORGEABLE = "forgeable"
    """No work at all, or a cheat, passed."""
    UNKNOWN = "unknown"
    """It has no reference solution: nothing that was tried passed, and whether anything would is not known."""


FAILED: Final = frozenset({Status.FLAKY, Status.BROKEN, Status.FORGEABLE})


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One task's check, and a file's contents. The next check of the task replaces it."""

    task: str
    status: Status
    reason: str
    trials: tuple[Trial, ...]
    architecture: str = ""
    version: int = 2


@runtime_checkable
class _Pool(Protocol):
    """An environment with more tasks than its splits took."""

    @property
    def tasks(self) -> Sequence[Task]: ...


async def check(
    environment: Environment,
    tasks: Sequence[Task],
    *,
    times: int = 1,
    cheats: bool = True,
    report: Callable[[Checked], None] | None = None,
) -> dict[str, Checked]:
    """Attempts each task with its reference solution, without any work and with cheats, `times` each; keeps what is found, by task.

    On the sandbox loop. Raises IsolationUnavailable.
    """
    room = asyncio.Semaphore(1 if isinstance(environment, Rehearsed) else _AT_ONCE)

    async def one(task: Task) -> Checked:
        async with room:
            if isinstance(environment, Rehearsed):
                trials = await machine_trials(environment, environment, task, times, cheats=cheats)
            else:
                trials = await answer_trials(environment, task, times, cheats=cheats)
        status, reason = _judged(trials, exact=not isinstance(environment, Rehearsed))
        found = Checked(task=task.id, status=status, reason=reason, trials=tuple(trials), architecture=architecture())
        _keep(environment, task, found)
        if report is not None:
            report(found)
        return found

    try:
        async with asyncio.TaskGroup() as group:
            running = {task.id: group.create_task(one(task)) for task in tasks}
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
    return {name: work.result() for name, work in running.items()}


def all_tasks(environment: Environment, ids: Sequence[str] = ()) -> tuple[Task, ...]:
    """Every task, or those with these ids. Raises ConfigError naming the nearest."""
    pool = environment.tasks if isinstance(environment, _Pool) else [task for tasks in environment.splits.values() for task in tasks]
    known = {task.id: task for task in pool}
    for one in ids:
        if one not in known:
            near = nearest(one, known)
            raise ConfigError(f"there is no task {one[:80]!r}" + (f"; did you mean {near!r}?" if near else f"; there are {len(known)}"))
    return tuple(known[one] for one in ids) if ids else tuple(known.values())


def failing(environment: Environment, tasks: Sequence[Task]) -> dict[str, str]:
    """Of `tasks`, those whose last check on this architecture failed, with the reason. Never checked is not failed."""
    return {task: found.reason for task, found in recorded(environment, tasks).items() if found.status in FAILED}


def refuse_failing(environment: Environment, *, allow: bool = False) -> None:
    """Before training. Raises ConfigError when a task of the environment's splits failed its check, unless that is allowed."""
    bad = {} if allow else failing(environment, [task for tasks in environment.splits.values() for task in tasks])
    if bad:
        task, reason = next(iter(bad.items()))
        raise ConfigError(
            f"{len(bad)} task(s) of {environment.name} failed `sandmill env check` on {architecture()}, such as {task}: {reason}; mend "
            "them, name them in leaveOut, or set allowFailing",
            field="spec.environment",
        )


def recorded(environment: Environment, tasks: Sequence[Task]) -> dict[str, Checked]:
    """What earlier checks of `tasks`, as they are now, found on this architecture."""
    found = {}
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            found[task.id] = msgspec.json.decode(_place(environment, task).read_bytes(), type=Checked)
    return found


def _place(environment: Environment, task: Task) -> Path:
    return state_root() / "checks" / _digest(environment, task)[:32] / f"{architecture()}.json"


def _digest(environment: Environment, task: Task) -> str:
    """The task's own, or, where it has none, one that any change of the environment makes another."""
    if isinstance(environment, Digested):
        return environment.task_digest(task)
    return hashlib.sha256(f"{environment.name}\0{environment.version}\0{environment.digest}\0{task.id}".encode()).hexdigest()


def _keep(environment: Environment, task: Task, found: Checked) -> None:
    place = _place(environment, task)
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_suffix(f".{os.getpid()}.new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    fresh.replace(place)


def _judged(trials: Sequence[Trial], *, exact: bool) -> tuple[Status, str]:
    """`exact`: the same attempt has to get the same reward every time."""
    solved = [trial for trial in trials if trial.kind is Kind.SOLUTION]
    forged = next((trial for trial in trials if trial.kind is not Kind.SOLUTION and trial.passed), None)
    if forged is not None:
        return Status.FORGEABLE, f"{forged.what} passes with reward {forged.reward:g}"
    missed = next((trial for trial in solved if not trial.passed), None)
    if missed is not None:
        some = any(trial.passed for trial in solved)
        why = missed.reason or f"its reward is {missed.reward:g}"
        beyond = f"; it also changed {', '.join(missed.outside[:5])}, which is not taken over (option take)" if missed.outside else ""
        return Status.FLAKY if some else Status.BROKEN, f"{_the(missed.what)} does not pass: {why}{beyond}"
    lost = next((trial for trial in trials if trial.kind is Kind.NOTHING and trial.reward is None), None)
    if lost is not None:
        return Status.BROKEN, f"{lost.what} could not be graded: {lost.reason}"
    fickle = _fickle(trials) if exact else None
    if fickle is not None:
        return Status.FLAKY, fickle
    if not solved:
        return Status.UNKNOWN, "it has no reference solution; nothing that was tried passes"
    return Status.SOUND, ""


def _the(what: str) -> str:
    return what if what.startswith("its ") else f"the {what}"


def _fickle(trials: Sequence[Trial]) -> str | None:
    """Which attempt got different rewards."""
    first: dict[str, float] = {}
    for trial in trials:
        if trial.reward is not None and first.setdefault(trial.what, trial.reward) != trial.reward:
            return f"{trial.what} is graded differently: reward {first[trial.what]:g}, then {trial.reward:g}"
    return None


__all__ = ["FAILED", "Checked", "Status", "all_tasks", "check", "failing", "recorded", "refuse_failing"]
