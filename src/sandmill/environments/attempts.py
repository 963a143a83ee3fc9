"""One attempt at a task, as a check makes it: the reference solution, no work at all, or a cheat. Out: what the grader made of it.

Tasks that are machines are worked on in a sandbox. Of questions the reference solution is the package's own answer, no work is silence, and
what nobody would take for an answer is the cheat.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from sandmill.environments.environment import Environment
from sandmill.environments.grading import grade_episode
from sandmill.environments.handover import Answered, GoesOn, Rehearsed, Scripted, sandbox_for
from sandmill.environments.task import Command, InfrastructureFailure, Submission, Task, Verdict
from sandmill.environments.verdicts import reason_of
from sandmill.errors import EnvironmentFailed, ExecFailed, SandboxError
from sandmill.sandboxes import Sandbox

COMMAND_TIMEOUT_S: Final = 60.0
MACHINE_GRADING_S: Final = 600.0
ANSWER_GRADING_S: Final = 60.0
JUNK: Final = "zzz"
_MOST_STEPS: Final = 100
_LARGEST_OUTPUT: Final = 1 << 16


class Kind(enum.StrEnum):
    """What an attempt is, and what it should come to."""

    SOLUTION = "solution"
    """Has to pass."""
    NOTHING = "nothing"
    """Must be graded, and must not pass."""
    CHEAT = "cheat"
    """Must not pass; it may break what grades it."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task. `reward` is None where nothing could be graded, and then `reason` says why."""

    what: str
    kind: Kind
    passed: bool
    reward: float | None
    reason: str = ""
    outside: tuple[str, ...] = ()
    """What it changed outside what is taken over for grading."""


async def machine_trials(environment: Environment, rehearsed: Rehearsed, task: Task, times: int, *, cheats: bool) -> list[Trial]:
    """Attempts at a task that is a machine, one after the other, `times` each."""
    wanted: list[tuple[str, Kind, str | None]] = [("untouched", Kind.NOTHING, "")]
    if rehearsed.has_solution(task):
        wanted = [("reference solution", Kind.SOLUTION, None), *wanted]
    if cheats:
        wanted += [(one.name, Kind.CHEAT, one.script) for one in rehearsed.cheats(task)]
    return [await _on_machine(environment, rehearsed, task, what, kind, script) for what, kind, script in wanted for _ in range(times)]


async def answer_trials(environment: Environment, task: Task, times: int, *, cheats: bool) -> list[Trial]:
    """Attempts at a question, `times` each: its own answer where it is known, silence, an empty answer and junk."""
    answer = expected_answer(environment, task)
    trials = []
    if has_solution(environment, task):
        what = "reference solution" if _commands(environment, task) else "its own answer"
        trials += [_trial(what, Kind.SOLUTION, await _verdict_on_solution(environment, task)) for _ in range(times)]
    for what, kind, given in (("silence", Kind.NOTHING, None), ("an empty answer", Kind.CHEAT, ""), (f"answer {JUNK}", Kind.NOTHING, JUNK)):
        if (cheats or kind is not Kind.CHEAT) and (given is None or given != answer):
            trials += [await _graded(environment, task, what, kind, Submission(answer=given)) for _ in range(times)]
    return trials


def expected_answer(environment: Environment, task: Task) -> str | None:
    """The environment's own answer; None where nobody knows one."""
    return environment.expected_answer(task) if isinstance(environment, Answered) else None


def has_solution(environment: Environment, task: Task) -> bool:
    """Whether the environment knows what should pass: an answer, or commands that lead to it."""
    return expected_answer(environment, task) is not None or bool(_commands(environment, task))


async def grade_solution(environment: Environment, task: Task) -> Verdict:
    """What the grader makes of the environment's own answer, with the commands before it that lead there. Raises SandboxError."""
    answer, commands = expected_answer(environment, task), _commands(environment, task)
    if not commands:
        return await grade_episode(environment, task, Submission(answer=answer), None, timeout_s=ANSWER_GRADING_S)
    async with _sandbox(environment, task) as sandbox:
        submission = Submission(answer=answer, commands=tuple([await _ran(sandbox, script) for script in commands]))
        return await grade_episode(environment, task, submission, sandbox, timeout_s=ANSWER_GRADING_S)


def _commands(environment: Environment, task: Task) -> tuple[str, ...]:
    return environment.solution(task) if isinstance(environment, Scripted) else ()


async def _verdict_on_solution(environment: Environment, task: Task) -> Verdict | Exception:
    try:
        return await grade_solution(environment, task)
    except (SandboxError, EnvironmentFailed) as error:
        return error


async def _ran(sandbox: Sandbox, script: str) -> Command:
    done = await sandbox.run.aio("bash", "-c", script, timeout=COMMAND_TIMEOUT_S, max_output=_LARGEST_OUTPUT, merge_stderr=True)
    return Command(script=script, exit_code=None if done.timed_out else done.exit_code, output=done.stdout.decode("utf-8", "replace"))


async def _on_machine(environment: Environment, rehearsed: Rehearsed, task: Task, what: str, kind: Kind, script: str | None) -> Trial:
    """One attempt: the reference solution (script None), or a script."""
    try:
        async with _sandbox(environment, task) as sandbox:
            submission = await _acted(environment, rehearsed, task, sandbox, script)
            trial = await _graded(environment, task, what, kind, submission, sandbox, timeout_s=MACHINE_GRADING_S)
    except (SandboxError, EnvironmentFailed) as error:
        return _trial(what, kind, error)
    return msgspec.structs.replace(trial, outside=rehearsed.outside(task))


async def _graded(
    environment: Environment,
    task: Task,
    what: str,
    kind: Kind,
    submission: Submission,
    sandbox: Sandbox | None = None,
    *,
    timeout_s: float = ANSWER_GRADING_S,
) -> Trial:
    return _trial(what, kind, await grade_episode(environment, task, submission, sandbox, timeout_s=timeout_s))


def _trial(what: str, kind: Kind, verdict: Verdict | Exception) -> Trial:
    if isinstance(verdict, Exception):
        return Trial(what=what, kind=kind, passed=False, reward=None, reason=reason_of(verdict))
    if isinstance(verdict, InfrastructureFailure):
        return Trial(what=what, kind=kind, passed=False, reward=None, reason=f"{verdict.boundary}: {verdict.reason}")
    return Trial(what=what, kind=kind, passed=verdict.passed, reward=verdict.reward)


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
                await sandbox.run.aio("bash", "-c", script, timeout=COMMAND_TIMEOUT_S)
        if not isinstance(environment, GoesOn) or await environment.next_message(task, submission, sandbox) is None:
            return submission
    raise EnvironmentFailed(f"task {task.id} has more than {_MOST_STEPS} steps")


__all__ = ["Kind", "Trial", "answer_trials", "expected_answer", "grade_solution", "has_solution", "machine_trials"]
