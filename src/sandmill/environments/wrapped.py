"""An environment around another: everything as the inner one says, until a subclass says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sandmill.environments.environment import Artifacts, Environment
from sandmill.environments.task import Submission, Task, Verdict
from sandmill.sandboxes import Sandbox, SandboxSpec


class WrappedEnvironment:
    """The members that every environment has, handed on. Optional ones: see `with_optional`."""

    def __init__(self, environment: Environment) -> None:
        self._inner = environment

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def version(self) -> str:
        return self._inner.version

    @property
    def digest(self) -> str:
        return self._inner.digest

    @property
    def sandbox(self) -> SandboxSpec:
        return self._inner.sandbox

    @property
    def splits(self) -> Mapping[str, Sequence[Task]]:
        return self._inner.splits

    def files(self, task: Task) -> Mapping[str, bytes]:
        return self._inner.files(task)

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        await self._inner.prepare(task, sandbox)

    async def collect(self, task: Task, sandbox: Sandbox) -> Artifacts:
        return await self._inner.collect(task, sandbox)

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        return await self._inner.grade(task, submission, artifacts)
