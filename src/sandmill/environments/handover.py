"""What an environment may offer besides, for tasks that are folders of a machine rather than questions.

In: a task, and the agent's sandbox as its processes left it. Out: what that sandbox should be, the next thing to say, a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from sandmill.environments.environment import Environment
from sandmill.environments.task import Submission, Task, Verdict
from sandmill.sandboxes import Sandbox, SandboxSpec


@runtime_checkable
class ChoosesSandboxes(Protocol):
    """Tasks with sandboxes of their own: an image each, their own limits."""

    async def sandbox_for(self, task: Task) -> SandboxSpec:
        """The sandbox of one task's episodes, its image built if need be. Raises SandboxError."""
        ...


@runtime_checkable
class GradesSandboxes(Protocol):
    """Grades what the agent left in its sandbox instead of bytes out of it. `collect` and `grade` are not called then."""

    def grading_timeout_s(self, task: Task) -> float:
        """How long `grade_sandbox` may take."""
        ...

    async def grade_sandbox(self, task: Task, submission: Submission, sandbox: Sandbox | None) -> Verdict:
        """The verdict on the files in `sandbox`, in which no process runs any more; None: the agent never ran a command, so they are as
        the task began. Whatever it runs of them, it runs elsewhere. Raises as `Environment.grade`."""
        ...


@runtime_checkable
class GoesOn(Protocol):
    """Tasks of several steps, one after the other in the same sandbox."""

    async def next_message(self, task: Task, submission: Submission, sandbox: Sandbox) -> str | None:
        """After an answer: what to say next, the sandbox made ready for it; None when that was the last step. Raises SandboxError,
        GraderFailed."""
        ...


@runtime_checkable
class LimitsAgents(Protocol):
    """Tasks that say how long an agent may take."""

    def agent_timeout_s(self, task: Task) -> float | None:
        """Seconds for all of an episode's turns; None: as long as the run allows."""
        ...


@runtime_checkable
class GradesGroups(Protocol):
    """Rewards that depend on the other episodes of a group, whose agents have no sandbox to grade. `grade` grades a group of one."""

    async def grade_group(self, task: Task, submissions: Sequence[Submission]) -> Sequence[Verdict]:
        """A verdict for each episode of one task, in their order. Raises as `Environment.grade`: then none has one."""
        ...


class Cheat(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a reward without the work: `script` runs in the agent's sandbox as the agent."""

    name: str
    script: str


@runtime_checkable
class Rehearsed(Protocol):
    """Tasks that come with a reference solution, and cheats to try on them."""

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """Carries out the reference solution in the agent's sandbox (of the present step). Raises EnvironmentFailed, SandboxError."""
        ...

    def has_solution(self, task: Task) -> bool:
        """Whether there is one."""
        ...

    def cheats(self, task: Task) -> tuple[Cheat, ...]:
        """Cheats that are worth trying on it."""
        ...

    def outside(self, task: Task) -> tuple[str, ...]:
        """What the last graded sandbox of this task had changed outside what is taken over for grading."""
        ...


@runtime_checkable
class Answered(Protocol):
    """Tasks that are answered, where the answer is known."""

    def expected_answer(self, task: Task) -> str | None:
        """One that should get the full reward; None where nobody knows one. Never shown to a policy."""
        ...


@runtime_checkable
class Scripted(Protocol):
    """Tasks whose answer is found by commands."""

    def solution(self, task: Task) -> tuple[str, ...]:
        """Commands that lead to the answer, for the agent's sandbox; none where the answer is enough. Never shown to a policy."""
        ...


@runtime_checkable
class Digested(Protocol):
    """Tasks that stay the same while others change."""

    def task_digest(self, task: Task) -> str:
        """sha256 (hex) over all that decides this task and its grading, and nothing else."""
        ...


async def sandbox_for(environment: Environment, task: Task) -> SandboxSpec:
    """The sandbox of one task's episodes: the task's own, or the environment's. Raises SandboxError."""
    return await environment.sandbox_for(task) if isinstance(environment, ChoosesSandboxes) else environment.sandbox


__all__ = [
    "Answered",
    "Cheat",
    "ChoosesSandboxes",
    "Digested",
    "GoesOn",
    "GradesGroups",
    "GradesSandboxes",
    "Rehearsed",
    "Scripted",
    "sandbox_for",
]
