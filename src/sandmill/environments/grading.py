"""A finished episode in, its verdict out. The agent's processes die first; what it left is read as data and graded elsewhere.

Order: kill every process in the agent's sandbox; `collect` (bytes out of it); `grade`, with a deadline. Whatever breaks on our side, the
grader included, is an InfrastructureFailure with its boundary and a reason, never a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from sandmill.environments.access.meter import Meter, metered
from sandmill.environments.environment import Artifacts, Environment
from sandmill.environments.handover import GradesGroups, GradesSandboxes
from sandmill.environments.health import GraderHealth
from sandmill.environments.task import Boundary, InfrastructureFailure, Submission, Task, Verdict
from sandmill.environments.verdicts import reason_of, sound_verdict, with_limit
from sandmill.errors import GraderFailed, IsolationUnavailable, SandboxError, SandboxFileError, SandboxGone
from sandmill.sandboxes import Sandbox

__all__ = ["GraderHealth", "LimitedGrading", "grade_episode", "grade_group"]

R = TypeVar("R")
KILL_TIMEOUT_S = 10.0
_GRADERS = (Boundary.GRADER, Boundary.JUDGE, Boundary.MCP)
CANCEL_GRACE_S = 1.0
"""How long a cancelled grader may take to end; after that it is left behind and no longer waited for."""
LARGEST_ARTIFACTS_BYTES = 64 << 20


@runtime_checkable
class LimitedGrading(Protocol):
    """An environment whose graders take turns. Waiting for a turn does not count against a grader's deadline."""

    def grading_turn(self) -> AbstractAsyncContextManager[None]: ...


async def grade_episode(
    environment: Environment,
    task: Task,
    submission: Submission,
    sandbox: Sandbox | None,
    *,
    timeout_s: float = 30.0,
    health: GraderHealth | None = None,
    retries: int = 0,
    meter: Meter | None = None,
) -> Verdict:
    """Grades one episode. `sandbox` is the agent's, or None when it never ran a command (then its files are the task's own).

    `timeout_s` bounds `collect` and `grade` each. A grading that breaks is tried again, `retries` times, on what the agent left: the
    episode need not be repeated for it, and where that did not help, that would not either. `meter` notes what graders ask outside.
    Raises only IsolationUnavailable, which ends the run, and cancellation.
    """
    meter = meter or Meter()
    (verdict,), called = await _tried(lambda: _grading(environment, task, submission, sandbox, timeout_s), _again, retries, meter)
    if retries and meter.lasting is None and isinstance(verdict, InfrastructureFailure) and verdict.boundary in _GRADERS:
        verdict = msgspec.structs.replace(verdict, retryable=False)
    if health is not None:
        health.record(verdict, called=called)
    return verdict


async def _tried(
    grade: Callable[[], Awaitable[tuple[tuple[Verdict, ...], bool]]], again: Callable[[Verdict], bool], retries: int, meter: Meter
) -> tuple[tuple[Verdict, ...], bool]:
    """The verdicts of the last grading, and whether the grader was reached in any; repeated while one may be had by `again`."""
    called = False
    with metered(meter):
        for left in range(retries, -1, -1):
            meter.begin()
            meter.gradings += 1
            verdicts, reached = await grade()
            called = called or reached
            if meter.failure is not None:  # whatever the grader made of it
                verdicts = (meter.failure,) * len(verdicts)
            if not left or meter.lasting is not None or not any(map(again, verdicts)):
                break
    return verdicts, called


def _passing(verdict: Verdict) -> bool:
    """Whether a whole group may be graded again for this one: what broke for good breaks again, and the others have their verdicts."""
    return isinstance(verdict, InfrastructureFailure) and verdict.retryable


def _again(verdict: Verdict) -> bool:
    """Whether another grading may come to something. A grader that raised may have raised for what has passed."""
    if not isinstance(verdict, InfrastructureFailure):
        return False
    return verdict.boundary is Boundary.GRADER or (verdict.retryable and verdict.boundary in (*_GRADERS, Boundary.EXEC))


async def _grading(
    environment: Environment, task: Task, submission: Submission, sandbox: Sandbox | None, timeout_s: float
) -> tuple[tuple[Verdict, ...], bool]:
    """One grading's verdict, and whether the grader was reached at all."""
    called = False
    try:
        if isinstance(environment, GradesSandboxes):
            collected = await _emptied(sandbox)
        else:
            collected = await _collected(environment, task, sandbox, timeout_s)
        if isinstance(collected, InfrastructureFailure):
            verdict: Verdict = collected
        else:
            async with _turn(environment):
                called = True
                returned = await _graded(environment, task, submission, sandbox, collected, timeout_s)
            verdict = with_limit(sound_verdict(returned), submission)
    except IsolationUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - the one place where a grader's failure is recorded
        verdict = _grader_failure(error)
    return (verdict,), called


async def grade_group(
    environment: Environment,
    task: Task,
    submissions: Sequence[Submission],
    *,
    timeout_s: float,
    health: GraderHealth | None = None,
    retries: int = 0,
    meter: Meter | None = None,
) -> tuple[Verdict, ...]:
    """Grades the episodes of one task together, within `timeout_s` for each of them; what breaks the grading leaves all without a reward.

    A grading that breaks for a passing reason is tried again, `retries` times. `meter` notes what the grader asks outside.
    Raises only IsolationUnavailable, which ends the run, and cancellation.
    """
    verdicts, called = await _tried(lambda: _group_grading(environment, task, submissions, timeout_s), _passing, retries, meter or Meter())
    if health is not None:
        for verdict in verdicts:
            health.record(verdict, called=called)
    return verdicts


async def _group_grading(
    environment: Environment, task: Task, submissions: Sequence[Submission], timeout_s: float
) -> tuple[tuple[Verdict, ...], bool]:
    assert isinstance(environment, GradesGroups)
    called = False
    try:
        async with _turn(environment):
            called = True
            returned = await _bounded(environment.grade_group(task, submissions), timeout_s * len(submissions), "the grader")
        return tuple(with_limit(sound_verdict(one), submission) for one, submission in zip(returned, submissions, strict=True)), called
    except IsolationUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - the one place where a group's failure is recorded
        return (_grader_failure(error),) * len(submissions), called


async def _graded(
    environment: Environment, task: Task, submission: Submission, sandbox: Sandbox | None, artifacts: Artifacts, timeout_s: float
) -> Verdict:
    if isinstance(environment, GradesSandboxes):
        return await _bounded(environment.grade_sandbox(task, submission, sandbox), environment.grading_timeout_s(task), "the grader")
    return await _bounded(environment.grade(task, submission, artifacts), timeout_s, "the grader")


async def _emptied(sandbox: Sandbox | None) -> Artifacts | InfrastructureFailure:
    """No process of the agent lives any more, and nothing is read out; or its sandbox is lost."""
    try:
        if sandbox is not None:
            await _killed(sandbox)
    except SandboxGone as error:
        return InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason=reason_of(error), retryable=True)
    return {}


async def _collected(environment: Environment, task: Task, sandbox: Sandbox | None, timeout_s: float) -> Artifacts | InfrastructureFailure:
    """The files to grade, with every process of the agent dead; or what broke in the agent's sandbox."""
    if sandbox is None:
        return environment.files(task)
    try:
        await _killed(sandbox)
        artifacts = await _bounded(environment.collect(task, sandbox), timeout_s, "collecting the agent's files")
    except IsolationUnavailable:
        raise
    except SandboxFileError as error:
        raise GraderFailed(f"collect could not read the agent's files, and a missing one must be an absent key: {error}") from error
    except SandboxGone as error:
        return InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason=reason_of(error), retryable=True)
    except SandboxError as error:
        return InfrastructureFailure(boundary=Boundary.EXEC, reason=reason_of(error), retryable=True)
    return _sound_artifacts(artifacts)


async def _killed(sandbox: Sandbox) -> None:
    """Every process in the sandbox is dead. A sandbox that cannot do that in time counts as lost."""
    try:
        await _bounded(sandbox.kill_processes.aio(), KILL_TIMEOUT_S, "killing the agent's processes")
    except TimeoutError as error:
        raise SandboxGone(sandbox.id, str(error)) from error


def _sound_artifacts(artifacts: object) -> Artifacts:
    if not isinstance(artifacts, Mapping) or not all(isinstance(k, str) and isinstance(v, bytes) for k, v in artifacts.items()):
        raise GraderFailed("collect must return file names with their bytes")
    size = sum(len(content) for content in artifacts.values())
    if size > LARGEST_ARTIFACTS_BYTES:
        raise GraderFailed(f"collect returned {size} bytes, more than the {LARGEST_ARTIFACTS_BYTES} that are graded: bound what it reads")
    return artifacts


def _grader_failure(error: Exception) -> InfrastructureFailure:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InfrastructureFailure(boundary=Boundary.DISK, reason=reason_of(error), retryable=False)
    passing = isinstance(error, SandboxError | TimeoutError)
    return InfrastructureFailure(boundary=Boundary.GRADER, reason=reason_of(error), retryable=passing)


def _turn(environment: Environment) -> AbstractAsyncContextManager[None]:
    return environment.grading_turn() if isinstance(environment, LimitedGrading) else contextlib.nullcontext()


async def _bounded(work: Coroutine[Any, Any, R], timeout_s: float, what: str) -> R:
    """Awaits `work` for `timeout_s` at most, whatever it does with its cancellation. Raises TimeoutError, and what `work` raises."""
    task = asyncio.ensure_future(_contained(work, what))
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise TimeoutError(f"{what} took longer than {timeout_s:g} s")
    except BaseException:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        task.add_done_callback(_look_away)
        raise
    if task.cancelled():
        raise GraderFailed(f"{what} cancelled itself")
    return task.result()


async def _contained(work: Coroutine[Any, Any, R], what: str) -> R:
    """`sys.exit()` in a task would end the whole event loop."""
    try:
        return await work
    except SystemExit as error:
        raise GraderFailed(f"{what} called exit({error.code!a})") from error


def _look_away(task: asyncio.Task[Any]) -> None:
    """Takes the outcome of a task nobody waits for, so that it is not reported as lost."""
    if not task.cancelled():
        task.exception()
