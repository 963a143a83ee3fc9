"""The seam of a task set: an `Environment` gives tasks, prepares a sandbox for one, and grades what the agent left.

The runner calls, for every episode and in this order: `prepare(task, sandbox)`; the agent's turns; then, with every process
of the agent dead, `collect(task, sandbox)` (bytes out of the agent's sandbox, read as data) and `grade(task, submission,
artifacts)`, which never touches the agent's sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from sandmill.environments.task import Submission, Task, Verdict
from sandmill.sandboxes import Sandbox, SandboxSpec

Artifacts = Mapping[str, bytes]
DIALOGUE = ("offer", "interact")
"""What an environment that takes part in the dialogue has besides (see `interaction`)."""
OPTIONAL = (
    *DIALOGUE,
    "demonstrations",
    "episode_turn",
    *("sandbox_for", "grade_sandbox", "grading_timeout_s", "next_message", "agent_timeout_s"),
    *("solve", "has_solution", "cheats", "task_digest", "outside", "expected_answer", "solution"),
)
"""All that it may have besides: scripted dialogues to warm-start on, and what `handover` names."""


class Environment(Protocol):
    """A versioned task set with a grader. Implementations never give an expected answer away through a `Task`."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def digest(self) -> str:
        """sha256 (hex) over everything that decides tasks and grading; kept in checkpoints to refuse a changed data set."""
        ...

    @property
    def sandbox(self) -> SandboxSpec: ...

    @property
    def splits(self) -> Mapping[str, Sequence[Task]]:
        """Split name to tasks. No two splits share a task `identity`. Always has `train` and `heldout`; others may exist."""
        ...

    def files(self, task: Task) -> Mapping[str, bytes]:
        """The task's starting files, by path relative to the sandbox's workdir; sandboxes are created with them in place."""
        ...

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        """Anything beyond `files` that must happen in the fresh sandbox before the agent. Raises SandboxError when it breaks."""
        ...

    async def collect(self, task: Task, sandbox: Sandbox) -> Artifacts:
        """Reads the resulting files after every agent process is dead. Bounded in size; missing files are absent keys."""
        ...

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """The verdict. May raise: the runner records that as an InfrastructureFailure at the grader boundary."""
        ...


W = TypeVar("W")


def with_optional(wrapper: W, environment: Environment, members: Iterable[str] = OPTIONAL) -> W:
    """`wrapper` with those optional members that the environment in it has."""
    for member in members:
        if hasattr(environment, member):
            setattr(wrapper, member, getattr(environment, member))
    return wrapper
