"""A task set of another format as an `Environment`. In: its plan and a manifest's section. Out: tasks, and verdicts by its own grader.

Everything of the package runs in its sandbox; rows with their answers stay on this side, and never in a `Task`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import msgspec

from sandmill.config.check import printable
from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.access.access import NOTHING, Access
from sandmill.environments.confusion import RIGHT, confused
from sandmill.environments.demonstration import Demonstration
from sandmill.environments.drawing import Drawn, draw
from sandmill.environments.environment import Artifacts
from sandmill.environments.foreign_interaction import ForeignInteraction, score_of, tools_of
from sandmill.environments.formats import Plan, plan
from sandmill.environments.interaction import Offer
from sandmill.environments.packages.asked import AskedService
from sandmill.environments.packages.install import Installed, Report, install
from sandmill.environments.packages.loaded import Launch, Lost
from sandmill.environments.packages.opening import not_loaded, open_package
from sandmill.environments.packages.protocol import Description, Row, Score
from sandmill.environments.packages.seats import Seats
from sandmill.environments.packages.wheels import PYTHON
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure, NoAnswer, Submission, Task, Verdict
from sandmill.environments.verdicts import reason_of
from sandmill.errors import ConfigError, GraderFailed
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.dual import block_on, hop

_TAGS: Final = re.compile(r"</?answer>")
"""A line that is an answer needs no tags."""
PARALLEL: Final = 8
"""Graders of one package that run at once; each is a process of its own."""
CPU: Final = 2.0
"""Cores of a package's sandbox, unless the options say how many."""
GRADING_S: Final = 600.0
"""A grader's deadline when nobody sets a shorter one."""
ROWS_S: Final = 600.0


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
        self._base = _base(plan, installed)
        self.digest = _digest(self._base, self.splits, self._rows)
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
        said = score.passed if self.plan.common.pass_at is None else None
        passed = score.reward >= self._passes_at if said is None else said
        return Graded(reward=score.reward, passed=passed, parts=score.parts)

    def solution(self, task: Task) -> tuple[str, ...]:
        """No commands: what solves a task is its answer."""
        return ()

    def expected_answer(self, task: Task) -> str | None:
        """An answer that should get the full reward, where the package knows one. Never shown to a policy."""
        return self._rows[task.id].answer

    def task_digest(self, task: Task) -> str:
        """sha256 (hex) over what is installed, how it is loaded and the task with its answer; not over how many are drawn."""
        row = self._rows[task.id]
        whole = self._base.copy()
        whole.update(f"{task.prompt}\0{row.answer}\0".encode("utf-8", "surrogatepass") + bytes(row.row))
        return whole.hexdigest()

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
        begun = await ForeignInteraction.begin(session, self.row(task), seed, self.offer.tools, release)
        begun.finishes_again = self.description.finishes_again
        return begun

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """What the episode's own process made of it at its end; an answer without an episode is the only thing said in one."""
        return self.verdict(score_of(submission.record or await self.answered(task, submission)), submission)

    async def answered(self, task: Task, submission: Submission) -> bytes:
        """The record of an episode in which an answer is the only thing said."""
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


def load(
    reference: str, section: EnvironmentSection, report: Report = lambda line: None, *, fit: bool = False, access: Access = NOTHING
) -> ForeignEnvironment:
    """Installs what `reference` names, unless it is installed, loads it and draws its splits. `access`: what its graders may use.

    `fit`: with fewer tasks than the section asks for where there are fewer; otherwise that is refused.
    Raises ConfigError (an option, a row), UnknownEnvironment, EnvironmentFailed (with the package's own reason), SandboxError.
    """
    return block_on(opened(reference, section, report, fit=fit, access=access))


async def opened(
    reference: str, section: EnvironmentSection, report: Report = lambda line: None, *, fit: bool = False, access: Access = NOTHING
) -> ForeignEnvironment:
    """`load`, for those who are on a loop."""
    return await hop(_load(plan(reference, section), section, report, fit, access))


async def _load(plan: Plan, section: EnvironmentSection, report: Report, fit: bool, access: Access = NOTHING) -> ForeignEnvironment:
    if plan.remote and access.anything:
        raise ConfigError(f"the graders of {plan.reference} run on a server of your own, which uses what you let it", field="spec.grading")
    installed, service = await _opened(plan, report, access)
    try:
        return await _drawn(plan, section, installed, service, fit, access)
    except BaseException:
        await service.close()
        installed.use.release()
        raise


async def _opened(plan: Plan, report: Report, access: Access) -> tuple[Installed, AskedService]:
    if plan.remote:
        from sandmill.environments.formats.openenv_remote import RemoteService

        return await install(plan.package, report), RemoteService(plan.remote, plan.load)
    return await open_package(plan.package, lambda installed: _launch(plan, installed, access), plan.name, plan.reference, report)


def _launch(plan: Plan, installed: Installed, access: Access = NOTHING) -> Launch:
    return Launch(
        adapter=plan.adapter,
        beside=plan.beside,
        options=plan.load,
        image=installed.record.image,
        python=PYTHON,
        memory=plan.common.memory,
        cpu=CPU if isinstance(plan.common.cpu, msgspec.UnsetType) else plan.common.cpu,
        access=access,
    )


async def _drawn(
    plan: Plan, section: EnvironmentSection, installed: Installed, service: AskedService, fit: bool, access: Access
) -> ForeignEnvironment:
    try:
        worker = await service.worker()

        async def fetch(split: str, start: int, stop: int) -> Sequence[Row]:
            return await worker.tasks(split, start, stop, timeout_s=ROWS_S)

        splits = await draw(worker.description, section, fetch, plan.source, allow_answers=plan.common.allow_answers_in_prompts, fit=fit)
    except (GraderFailed, TimeoutError) as error:
        raise not_loaded(plan.name, error) from error
    _check_uses(plan, worker.description, access)
    return _kind(worker.description)(plan, installed, worker.description, service, splits)


def _kind(description: Description) -> type[ForeignEnvironment]:
    from sandmill.environments import foreign_groups

    if description.multi_turn or description.tools:
        return foreign_groups.DialoguesTogether if description.grouped else DialogueEnvironment
    return foreign_groups.RepliesTogether if description.grouped else ForeignEnvironment


def _check_uses(plan: Plan, description: Description, access: Access) -> None:
    """Raises ConfigError for what its graders cannot do without, and were not given."""
    lacking = access.lacks(description.uses)
    if lacking is not None:
        kind = lacking.partition(":")[0]
        field = f"spec.grading.{kind if kind in ('network', 'judge', 'mcp') else 'judge'}"
        said = f"use {printable(lacking)[:100]}, which they are not given; name it there (sandmill env: --grading FILE)"
        raise ConfigError(f"the graders of {plan.name} {said}", field=field)


def _base(plan: Plan, installed: Installed) -> hashlib._Hash:
    """Over what is installed and how it is loaded."""
    whole = hashlib.sha256(f"{plan.name}\0{installed.record.digest}\0{plan.adapter}\0".encode())
    whole.update(msgspec.json.encode([plan.load, plan.common, plan.beside], order="deterministic"))
    return whole


def _digest(base: hashlib._Hash, splits: Mapping[str, Sequence[Task]], rows: Mapping[str, Row]) -> str:
    """Over that, and every task drawn with its answer."""
    whole = base.copy()
    for split, tasks in splits.items():
        for task in tasks:
            whole.update(f"{split}\0{task.id}\0{task.identity}\0{task.prompt}\0{rows[task.id].answer}\0".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()
