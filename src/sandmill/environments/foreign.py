"""A task set of another format as an `Environment`. In: its plan and a manifest's section. Out: tasks, and verdicts by its own grader.

Everything of the package runs in its sandbox; rows with their answers stay on this side, and never in a `Task`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import msgspec

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.confusion import RIGHT, confused
from sandmill.environments.demonstration import Demonstration
from sandmill.environments.drawing import Drawn, draw
from sandmill.environments.environment import Artifacts
from sandmill.environments.foreign_interaction import ForeignInteraction, score_of, tools_of
from sandmill.environments.formats import Plan, plan
from sandmill.environments.interaction import Offer
from sandmill.environments.packages.asked import AskedService
from sandmill.environments.packages.install import Installed, Report, add_bytecode, install, remember
from sandmill.environments.packages.loaded import Launch, Lost
from sandmill.environments.packages.protocol import Description, Row, Score
from sandmill.environments.packages.seats import Seats
from sandmill.environments.packages.service import PackageService
from sandmill.environments.packages.wheels import PYTHON
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure, NoAnswer, Submission, Task, Verdict
from sandmill.environments.verdicts import reason_of
from sandmill.errors import ConfigError, EnvironmentFailed, GraderFailed
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.dual import block_on

_TAGS: Final = re.compile(r"</?answer>")
"""A line that is an answer needs no tags."""
PARALLEL: Final = 8
"""Graders of one package that run at once; each is a process of its own."""
GRADING_S: Final = 600.0
"""A grader's deadline when nobody sets a shorter one."""
ROWS_S: Final = 600.0
SLOW_LOAD_S: Final = 1.0
"""A package that takes longer to load has its modules compiled."""


class ForeignEnvironment:
    """A package's tasks and grader. Belongs to the event loop that it first grades on; `close` ends its sandbox."""

    offer = Offer(tools=())

    def __init__(
        self, plan: Plan, installed: Installed, description: Description, service: AskedService, splits: Mapping[str, Sequence[Drawn]]
    ) -> None:
        self.plan = plan
        self.installed = installed
        self.description = description
        self.service = service
        self.name = plan.name
        self.version = plan.version or description.version
        self.sandbox = SandboxSpec()
        self.splits: Mapping[str, Sequence[Task]] = {name: tuple(one.task for one in drawn) for name, drawn in splits.items()}
        self._rows = {one.task.id: one.row for drawn in splits.values() for one in drawn}
        self.digest = _digest(plan, installed, self.splits, self._rows)
        self._passes_at = description.passes_at if plan.common.pass_at is None else plan.common.pass_at
        self._turns: asyncio.Semaphore | None = None

    def files(self, task: Task) -> Mapping[str, bytes]:
        """None: the package's tasks are questions."""
        return {}

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        """Nothing."""

    async def collect(self, task: Task, sandbox: Sandbox) -> Artifacts:
        """Nothing."""
        return {}

    @contextlib.asynccontextmanager
    async def grading_turn(self) -> AsyncIterator[None]:
        """Waits for a place, and for the package to be loaded; the deadline of a grader begins after this."""
        self._turns = self._turns or asyncio.Semaphore(PARALLEL)
        async with self._turns:
            await self.service.worker()
            yield

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """By the package's grader, in a process of its own. A call that is cancelled is killed. Raises GraderFailed, TimeoutError."""
        worker = await self.service.worker()
        context = {"turns": len(submission.commands) + 1}
        try:
            score = await worker.grade(self._rows[task.id].row, submission.answer, context, timeout_s=GRADING_S)
        except Lost as error:
            return InfrastructureFailure(boundary=Boundary.GRADER, reason=reason_of(error), retryable=True)
        return self.verdict(score, submission)

    def verdict(self, score: Score, submission: Submission) -> Verdict:
        """What a score is worth."""
        if not score.answered or (submission.answer is None and submission.limit is None):
            return NoAnswer(reward=score.reward, parts=score.parts)
        passed = score.reward >= self._passes_at if score.passed is None else score.passed
        return Graded(reward=score.reward, passed=passed, parts=score.parts)

    def solution(self, task: Task) -> tuple[str, ...]:
        """No commands: what solves a task is its answer."""
        return ()

    def expected_answer(self, task: Task) -> str | None:
        """An answer that should get the full reward, where the package knows one. Never shown to a policy."""
        return self._rows[task.id].answer

    def demonstrations(self, seed: int, right: float = RIGHT) -> Iterator[Demonstration]:
        """How an episode goes, seldom right unless asked for (see `confusion`). Raises ConfigError where answers are not known."""
        tasks = self.splits["train"]
        if unknown := next((task for task in tasks if self.expected_answer(task) is None), None):
            said = f"{self.name} does not say what solves its tasks (such as {unknown.id[:80]!a}): there is nothing to warm-start on"
            raise ConfigError(said, field="spec.warmStart.steps")
        return confused(tasks, lambda task: (f"= {_TAGS.sub('', self.expected_answer(task) or '')}",), seed, right)

    def row(self, task: Task) -> msgspec.Raw:
        """What the package's own grader and sessions take for this task. Never shown to a policy."""
        return self._rows[task.id].row

    async def close(self) -> None:
        """Ends the package's sandbox. Idempotent."""
        await self.service.close()
        self.installed.use.release()


class DialogueEnvironment(ForeignEnvironment):
    """A package that answers what the model says or calls, each episode in a process of its own, and grades it there at its end."""

    def __init__(
        self, plan: Plan, installed: Installed, description: Description, service: AskedService, splits: Mapping[str, Sequence[Drawn]]
    ) -> None:
        super().__init__(plan, installed, description, service, splits)
        self.offer = Offer(tools=tools_of(description.tools))
        self.seats = Seats(service, description.sessions)

    def episode_turn(self) -> AbstractAsyncContextManager[object]:
        """See `LimitedEpisodes`."""
        return self.seats.turn()

    async def interact(self, task: Task, seed: int) -> ForeignInteraction:
        """See `Interactive`."""
        session, release = await self.seats.session()
        return await ForeignInteraction.begin(session, self.row(task), seed, self.offer.tools, release)

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """What the episode's own process made of it at its end; an answer without an episode is the only thing said in one."""
        return self.verdict(score_of(submission.record or await self._answered(task, submission)), submission)

    async def _answered(self, task: Task, submission: Submission) -> bytes:
        episode = await self.interact(task, 0)
        try:
            if submission.answer is not None:
                await episode.reply(submission.answer)
            return await episode.finish(submission)
        finally:
            await episode.close()

    def verdict(self, score: Score, submission: Submission) -> Verdict:
        """An episode may end with a call, so that a missing answer means nothing unless the package says so."""
        if not score.answered:
            return NoAnswer(reward=score.reward, parts=score.parts)
        return super().verdict(score, msgspec.structs.replace(submission, answer=submission.answer or ""))

    async def close(self) -> None:
        """See `ForeignEnvironment`."""
        await self.seats.close()
        await super().close()


def load(reference: str, section: EnvironmentSection, report: Report = lambda line: None, *, fit: bool = False) -> ForeignEnvironment:
    """Installs what `reference` names, unless it is installed, loads it and draws its splits.

    `fit`: with fewer tasks than the section asks for where there are fewer; otherwise that is refused.
    Raises ConfigError (an option, a row), UnknownEnvironment, EnvironmentFailed (with the package's own reason), SandboxError.
    """
    return block_on(_load(plan(reference, section), section, report, fit))


async def _load(plan: Plan, section: EnvironmentSection, report: Report, fit: bool) -> ForeignEnvironment:
    installed = await install(plan.package, report)
    service = _service(plan, installed)
    try:
        if isinstance(service, PackageService):
            installed, service = await _warmed(plan, installed, service, report)
            await remember(installed, plan.reference)
        return await _drawn(plan, section, installed, service, fit)
    except BaseException:
        await service.close()
        installed.use.release()
        raise


def _service(plan: Plan, installed: Installed) -> AskedService:
    if plan.remote:
        from sandmill.environments.formats.openenv_remote import RemoteService

        return RemoteService(plan.remote, plan.load)
    return PackageService(_launch(plan, installed))


def _launch(plan: Plan, installed: Installed) -> Launch:
    return Launch(
        adapter=plan.adapter,
        beside=plan.beside,
        options=plan.load,
        image=installed.record.image,
        python=PYTHON,
        memory=plan.common.memory,
    )


async def _warmed(plan: Plan, installed: Installed, service: PackageService, report: Report) -> tuple[Installed, PackageService]:
    """The package loaded; after its first load, from an image in which what it imports is compiled."""
    started = time.monotonic()
    report(f"loading {plan.name}")
    try:
        worker = await service.worker()
    except (GraderFailed, TimeoutError) as error:
        raise _not_loaded(plan, error) from error
    if installed.record.compiled or time.monotonic() - started < SLOW_LOAD_S:
        return installed, service
    report(f"compiling {len(worker.description.modules)} modules of {plan.name}")
    await service.close()
    installed = await add_bytecode(installed, worker.description.modules)
    return installed, PackageService(_launch(plan, installed))


async def _drawn(plan: Plan, section: EnvironmentSection, installed: Installed, service: AskedService, fit: bool) -> ForeignEnvironment:
    try:
        worker = await service.worker()

        async def fetch(split: str, start: int, stop: int) -> Sequence[Row]:
            return await worker.tasks(split, start, stop, timeout_s=ROWS_S)

        splits = await draw(worker.description, section, fetch, plan.source, allow_answers=plan.common.allow_answers_in_prompts, fit=fit)
    except (GraderFailed, TimeoutError) as error:
        raise _not_loaded(plan, error) from error
    spoken = worker.description.multi_turn or worker.description.tools
    kind = DialogueEnvironment if spoken else ForeignEnvironment
    return kind(plan, installed, worker.description, service, splits)


def _not_loaded(plan: Plan, error: Exception) -> EnvironmentFailed:
    return EnvironmentFailed(f"environment {plan.name} could not be loaded: {error}")


def _digest(plan: Plan, installed: Installed, splits: Mapping[str, Sequence[Task]], rows: Mapping[str, Row]) -> str:
    """Over what is installed, how it is loaded, and every task drawn with its answer."""
    whole = hashlib.sha256(f"{plan.name}\0{installed.record.digest}\0{plan.adapter}\0".encode())
    whole.update(msgspec.json.encode([plan.load, plan.common, plan.beside], order="deterministic"))
    for split, tasks in splits.items():
        for task in tasks:
            whole.update(f"{split}\0{task.id}\0{task.identity}\0{task.prompt}\0{rows[task.id].answer}\0".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()
