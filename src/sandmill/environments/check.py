"""Whether tasks can be trusted. In: an environment whose tasks have reference solutions. Out: per task, whether the solution passes, the
untouched state fails and every cheat fails; kept by architecture, and asked for before training.

    <state>/checks/<digest of the task>/<architecture>.json
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from sandmill.environments.environment import Environment
from sandmill.environments.grading import grade_episode
from sandmill.environments.handover import GoesOn, Rehearsed, sandbox_for
from sandmill.environments.task import InfrastructureFailure, Submission, Task, Verdict
from sandmill.environments.verdicts import reason_of
from sandmill.errors import ConfigError, EnvironmentFailed, ExecFailed, SandboxError
from sandmill.sandboxes import Sandbox
from sandmill.sandboxes.backends.native.state import state_root
from sandmill.sandboxes.images.image import architecture

CHEAT_TIMEOUT_S: Final = 60.0
_MOST_STEPS: Final = 100
REFERENCE: Final = "reference solution"
UNTOUCHED: Final = "untouched"


class Status(enum.StrEnum):
    """What a check of one task came to."""

    SOUND = "sound"
    """The reference solution passed every time, the untouched state and every cheat failed every time."""
    FLAKY = "flaky"
    """The reference solution passed some of the times."""
    BROKEN = "broken"
    """The reference solution never passed, or something could not be graded."""
    FORGEABLE = "forgeable"
    """The untouched state or a cheat passed."""
    UNKNOWN = "unknown"
    """It has no reference solution."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task. `reward` is None where nothing could be graded, and then `reason` says why."""

    what: str
    passed: bool
    reward: float | None
    reason: str = ""
    outside: tuple[str, ...] = ()
    """What it changed outside what is taken over for grading."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One task's check, and a file's contents. The next check of the task replaces it."""

    task: str
    status: Status
    reason: str
    trials: tuple[Trial, ...]
    architecture: str = ""
    version: int = 1


@runtime_checkable
class _Pool(Protocol):
    """An environment with more tasks than its splits took."""

    @property
    def tasks(self) -> Sequence[Task]: ...


@runtime_checkable
class _Lenient(Protocol):
    """An environment that was told to train on tasks that fail."""

    @property
    def allow_failing(self) -> bool: ...


async def check(
    environment: Environment,
    tasks: Sequence[Task],
    *,
    times: int = 1,
    cheats: bool = True,
    report: Callable[[Checked], None] | None = None,
) -> dict[str, Checked]:
    """Checks `tasks` one after the other, reference solution and untouched state `times` each, and keeps what is found, by task.

    On the sandbox loop. Raises ConfigError when the environment has no reference solutions at all, IsolationUnavailable.
    """
    if not isinstance(environment, Rehearsed):
        raise ConfigError(f"{environment.name} has no reference solutions to check tasks by")
    done: dict[str, Checked] = {}
    for task in tasks:
        done[task.id] = found = await _checked(environment, environment, task, times, cheats)
        _keep(environment, task, found)
        if report is not None:
            report(found)
    return done


def all_tasks(environment: Environment, ids: Sequence[str] = ()) -> tuple[Task, ...]:
    """Every task, or those with these ids. Raises ConfigError naming the nearest."""
    pool = environment.tasks if isinstance(environment, _Pool) else [task for tasks in environment.splits.values() for task in tasks]
    known = {task.id: task for task in pool}
    for one in ids:
        if one not in known:
            from sandmill.config.check import nearest

            near = nearest(one, known)
            raise ConfigError(f"there is no task {one[:80]!r}" + (f"; did you mean {near!r}?" if near else f"; there are {len(known)}"))
    return tuple(known[one] for one in ids) if ids else tuple(known.values())


def failing(environment: Rehearsed, tasks: Sequence[Task]) -> dict[str, str]:
    """Of `tasks`, those whose last check on this architecture failed, with the reason. Never checked is not failed."""
    known = recorded(environment, tasks)
    bad = {Status.BROKEN, Status.FLAKY, Status.FORGEABLE}
    return {task: found.reason for task, found in known.items() if found.status in bad}


def refuse_failing(environment: Environment) -> None:
    """Before training. Raises ConfigError when a task of the environment's splits failed its check, unless it was told otherwise."""
    if not isinstance(environment, Rehearsed) or (isinstance(environment, _Lenient) and environment.allow_failing):
        return
    bad = failing(environment, [task for tasks in environment.splits.values() for task in tasks])
    if bad:
        task, reason = next(iter(bad.items()))
        raise ConfigError(
            f"{len(bad)} task(s) of {environment.name} failed `sandmill env check` on {architecture()}, such as {task}: {reason}; mend "
            "them, name them in option leave_out, or set option allow_failing",
            field="spec.environment",
        )


def recorded(environment: Rehearsed, tasks: Sequence[Task]) -> dict[str, Checked]:
    """What earlier checks of `tasks`, as they are now, found on this architecture."""
    found = {}
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            found[task.id] = msgspec.json.decode(_place(environment, task).read_bytes(), type=Checked)
    return found


def _place(environment: Rehearsed, task: Task) -> Path:
    return state_root() / "checks" / environment.task_digest(task)[:32] / f"{architecture()}.json"


def _keep(environment: Rehearsed, task: Task, found: Checked) -> None:
    place = _place(environment, task)
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_suffix(f".{os.getpid()}.new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    fresh.replace(place)


async def _checked(environment: Environment, rehearsed: Rehearsed, task: Task, times: int, cheats: bool) -> Checked:
    if not rehearsed.has_solution(task):
        return Checked(task=task.id, status=Status.UNKNOWN, reason="it has no reference solution", trials=(), architecture=architecture())
    trials = [await _trial(environment, rehearsed, task, REFERENCE, None) for _ in range(times)]
    trials += [await _trial(environment, rehearsed, task, UNTOUCHED, "") for _ in range(times)]
    if cheats:
        trials += [await _trial(environment, rehearsed, task, cheat.name, cheat.script) for cheat in rehearsed.cheats(task)]
    status, reason = _judged(trials)
    return Checked(task=task.id, status=status, reason=reason, trials=tuple(trials), architecture=architecture())


def _judged(trials: Sequence[Trial]) -> tuple[Status, str]:
    solved = [trial for trial in trials if trial.what == REFERENCE]
    others = [trial for trial in trials if trial.what != REFERENCE]
    forged = next((trial for trial in others if trial.passed), None)
    if forged is not None:
        return Status.FORGEABLE, f"{forged.what} passes with reward {forged.reward:g}"
    lost = next((trial for trial in trials if trial.what == UNTOUCHED and trial.reward is None), None)
    missed = next((trial for trial in solved if not trial.passed), None)
    if missed is not None:
        some = any(trial.passed for trial in solved)
        why = missed.reason or f"its reward is {missed.reward:g}"
        beyond = f"; it also changed {', '.join(missed.outside[:5])}, which is not taken over (option take)" if missed.outside else ""
        return Status.FLAKY if some else Status.BROKEN, f"the reference solution does not pass: {why}{beyond}"
    if lost is not None:
        return Status.BROKEN, f"{lost.what} could not be graded: {lost.reason}"
    return Status.SOUND, ""


async def _trial(environment: Environment, rehearsed: Rehearsed, task: Task, what: str, script: str | None) -> Trial:
    """One attempt: the reference solution (script None), or a script."""
    try:
        async with _sandbox(environment, task) as sandbox:
            submission = await _acted(environment, rehearsed, task, sandbox, script)
            verdict = await grade_episode(environment, task, submission, sandbox, timeout_s=600.0)
    except (SandboxError, EnvironmentFailed) as error:
        return Trial(what=what, passed=False, reward=None, reason=reason_of(error))
    return _trial_of(what, verdict, rehearsed.outside(task))


def _trial_of(what: str, verdict: Verdict, outside: tuple[str, ...]) -> Trial:
    if isinstance(verdict, InfrastructureFailure):
        return Trial(what=what, passed=False, reward=None, reason=f"{verdict.boundary}: {verdict.reason}", outside=outside)
    return Trial(what=what, passed=verdict.passed, reward=verdict.reward, outside=outside)


@contextlib.asynccontextmanager
async def _sandbox(environment: Environment, task: Task) -> AsyncIterator[Sandbox]:
    spec = await sandbox_for(environment, task)
    async with await Sandbox.from_spec.aio(spec, files=environment.files(task), server="") as sandbox:
        await environment.prepare(task, sandbox)
        yield sandbox


async def _acted(environment: Environment, rehearsed: Rehearsed, task: Task, sandbox: Sandbox, script: str | None) -> Submission:
    """All steps of a task, as an agent would go through them."""
    submission = Submission(answer="done")
    for _ in range(_MOST_STEPS):
        if script is None:
            await rehearsed.solve(task, sandbox)
        elif script:
            with contextlib.suppress(ExecFailed):  # the cheat before it may have broken the shell
                await sandbox.run.aio("bash", "-c", script, timeout=CHEAT_TIMEOUT_S)
        if not isinstance(environment, GoesOn) or await environment.next_message(task, submission, sandbox) is None:
            return submission
    raise EnvironmentFailed(f"task {task.id} has more than {_MOST_STEPS} steps")


__all__ = ["Checked", "Status", "Trial", "all_tasks", "check", "failing", "recorded", "refuse_failing"]
