"""An environment in; out, which of its tasks refuse their own answer, accept none at all or anything, or change their mind.

This asks the grader about answers only: what else an agent could do with commands is no part of it. Where an answer counts only with work
behind it, the environment's own commands come before its own answer, in a real sandbox.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import Final, Protocol, cast, runtime_checkable

import msgspec

from sandmill.environments.environment import Environment
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import Command, InfrastructureFailure, Submission, Task, Verdict
from sandmill.sandboxes import Sandbox

JUNK: Final = "zzz"
_AT_ONCE: Final = 8


class Fault(enum.StrEnum):
    """What is wrong with a task."""

    REFUSES_ITS_ANSWER = "refuses its own answer"
    ACCEPTS_NONE = "accepts no answer"
    ACCEPTS_JUNK = "accepts any answer"
    CHANGES_ITS_MIND = "grades the same answer differently"
    BREAKS = "breaks"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of one task; `said`: the verdict or reason, for people."""

    task: str
    fault: Fault
    said: str


class Soundness(msgspec.Struct, frozen=True, kw_only=True):
    """What a check came to. `unanswered`: tasks whose own answer nobody knows."""

    tasks: int
    unanswered: int
    findings: tuple[Finding, ...]


class Answers(Protocol):
    """What an environment has that knows answers to its tasks."""

    def expected_answer(self, task: Task) -> str | None: ...


@runtime_checkable
class Worked(Protocol):
    """What an environment has whose answers count only after work in a sandbox."""

    def solution(self, task: Task) -> Sequence[str]:
        """The scripts of bash that come before the answer."""
        ...


def own_answer(environment: Environment, task: Task) -> str | None:
    """The environment's own answer, None where it knows none."""
    return cast("Answers", environment).expected_answer(task) if hasattr(environment, "expected_answer") else None


async def grade_own(environment: Environment, task: Task, answer: str | None, *, timeout_s: float = 60.0) -> Verdict:
    """Grades the environment's own answer, with the environment's own commands before it. Raises SandboxError."""
    if not isinstance(environment, Worked):
        return await grade_episode(environment, task, Submission(answer=answer), None, timeout_s=timeout_s)
    async with await Sandbox.from_spec.aio(environment.sandbox, files=environment.files(task), server="") as sandbox:
        await environment.prepare(task, sandbox)
        commands = []
        for script in environment.solution(task):
            done = await sandbox.run.aio("bash", "-c", script, timeout=timeout_s, merge_stderr=True)
            commands.append(Command(script=script, exit_code=done.exit_code, output=done.stdout.decode("utf-8", "replace")))
        submission = Submission(answer=answer, commands=tuple(commands))
        return await grade_episode(environment, task, submission, sandbox, timeout_s=timeout_s)


async def check_answers(environment: Environment, tasks: Sequence[Task], *, repeats: int = 2, timeout_s: float = 60.0) -> Soundness:
    """Grades each task's own answer, junk, and silence, `repeats` times each."""
    room = asyncio.Semaphore(_AT_ONCE)
    answers = [own_answer(environment, task) for task in tasks]

    async def check(task: Task, answer: str | None) -> list[Finding]:
        async with room:
            return await _check(environment, task, answer, repeats, timeout_s)

    found = await asyncio.gather(*(check(task, answer) for task, answer in zip(tasks, answers, strict=True)))
    return Soundness(
        tasks=len(tasks),
        unanswered=0 if isinstance(environment, Worked) else sum(answer is None for answer in answers),
        findings=tuple(one for findings in found for one in findings),
    )


async def _check(environment: Environment, task: Task, answer: str | None, repeats: int, timeout_s: float) -> list[Finding]:
    findings = []
    for given, wanted, fault in (
        (answer, True, Fault.REFUSES_ITS_ANSWER),
        (None, False, Fault.ACCEPTS_NONE),
        (JUNK, False, Fault.ACCEPTS_JUNK),
    ):
        if given is None and wanted and not isinstance(environment, Worked):
            continue
        verdicts = [await _graded(environment, task, given, own=wanted, timeout_s=timeout_s) for _ in range(repeats)]
        broken = next((one for one in verdicts if isinstance(one, InfrastructureFailure)), None)
        if broken is not None:
            findings.append(Finding(task=task.id, fault=Fault.BREAKS, said=f"with {_shown(given)}: {broken.reason}"))
        elif any(one != verdicts[0] for one in verdicts):
            findings.append(Finding(task=task.id, fault=Fault.CHANGES_ITS_MIND, said=" then ".join(_said(one) for one in verdicts)))
        elif _passed(verdicts[0]) is not wanted:
            findings.append(Finding(task=task.id, fault=fault, said=f"with {_shown(given)}: {_said(verdicts[0])}"))
    return findings


async def _graded(environment: Environment, task: Task, answer: str | None, *, own: bool, timeout_s: float) -> Verdict:
    if own:
        return await grade_own(environment, task, answer, timeout_s=timeout_s)
    return await grade_episode(environment, task, Submission(answer=answer), None, timeout_s=timeout_s)


def _passed(verdict: Verdict) -> bool:
    return not isinstance(verdict, InfrastructureFailure) and verdict.passed


def _said(verdict: Verdict) -> str:
    return verdict.reason if isinstance(verdict, InfrastructureFailure) else f"reward {verdict.reward:g}"


def _shown(answer: str | None) -> str:
    return "no answer" if answer is None else f"answer {answer[:80]!a}"
