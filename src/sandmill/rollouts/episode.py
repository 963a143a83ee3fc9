"""One attempt at one task: sample, act, observe, until an answer or a limit; then grade. In: a task; out: an `Episode`.

What broke is recorded here, at its boundary, and nowhere else: a `SandboxError` becomes an InfrastructureFailure, never a
reward. A dead engine and a machine that cannot isolate are not an episode's failure: they fly and end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping

import msgspec

from sandmill.environments.access.meter import Meter, metered
from sandmill.environments.grading import grade_episode
from sandmill.environments.handover import ChoosesSandboxes, GoesOn, GradesGroups, LimitsAgents
from sandmill.environments.interaction import Interaction, Reaction, episode_turn, finishes_again, interactive, offer_of
from sandmill.environments.task import (
    Boundary,
    Command,
    InfrastructureFailure,
    Limit,
    Message,
    Role,
    Submission,
    Task,
    ToolCall,
    Verdict,
)
from sandmill.environments.tools import BASH
from sandmill.errors import ContextFull, ExecFailed, SandboxGone
from sandmill.models.chat import Answer, Call, Malformed, Observation
from sandmill.models.model import Sampling, Session, StopReason
from sandmill.rollouts.arena import Arena
from sandmill.rollouts.boundaries import Broken, boundary, environment_boundary
from sandmill.rollouts.seeds import derive
from sandmill.rollouts.timeline import Timeline
from sandmill.rollouts.trajectory import Episode, Stage, Trajectory, Turn
from sandmill.sandboxes import Sandbox

_LEAVE_S = 10.0
_log = logging.getLogger("sandmill.rollouts")
_CANNOT_START = 126
"""The shells' exit code for a command that was found and could not be run."""
_LIMIT_OF_STOP = {StopReason.LENGTH: Limit.TOKENS, StopReason.CONTEXT: Limit.CONTEXT}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which attempt this is; with the run's seed it decides every random choice of the episode."""

    group: str
    index: int
    attempt: int = 0


class _Attempt:
    """The growing state of one attempt; what it has so far is a valid trajectory at any time."""

    def __init__(self, arena: Arena, task: Task, sampling: Sampling) -> None:
        self.arena = arena
        self.task = task
        self.sampling = sampling
        self.timeline = Timeline(arena.origin)
        self.turns: list[Turn] = []
        self.commands: list[Command] = []
        self.text: list[tuple[str, str]] = [("task", task.prompt)]
        self.malformed = 0
        self.messages: list[Message] = []
        self.answer: str | None = None
        self.limit: Limit | None = None
        self.sandbox: Sandbox | None = None
        self.offer = offer_of(arena.environment)
        self.interaction: Interaction | None = None
        self.clock = asyncio.timeout(None)
        self.meter = Meter()

    async def play(self, session: Session) -> None:
        """The agent's turns, under the episode's wall-clock limit."""
        try:
            async with asyncio.timeout(self._patience_s()) as self.clock:
                await self._turns(session)
        except TimeoutError:
            self.limit = Limit.TIME

    def _patience_s(self) -> float:
        """The run's limit, or the task's own where that is shorter."""
        limit_s, environment = self.arena.limits.episode_timeout_s, self.arena.environment
        own_s = environment.agent_timeout_s(self.task) if isinstance(environment, LimitsAgents) else None
        return limit_s if own_s is None else min(limit_s, own_s)

    @contextlib.contextmanager
    def _own_time(self) -> Iterator[None]:
        """What happens here does not count as the agent's time. It has a deadline of its own."""
        loop, left_s = asyncio.get_running_loop(), self.clock.when()
        began = loop.time()
        self.clock.reschedule(None)
        try:
            yield
        finally:
            self.clock.reschedule(None if left_s is None else left_s + loop.time() - began)

    async def _turns(self, session: Session) -> None:
        dialogue = self.arena.dialogue
        context = dialogue.open(await self._opening())
        for _ in range(self.arena.limits.max_turns):
            observations = await self._turn(session, context)
            if observations is None:
                return
            context = dialogue.observe(observations, self.turns[-1].stop)
        self.limit = Limit.TURNS

    async def _turn(self, session: Session, context: tuple[int, ...]) -> list[Observation] | None:
        """One round. None when the episode is over (an answer, a limit)."""
        try:
            with self.timeline.span(Stage.MODEL):
                sample = await session.sample(context, self.sampling)
        except ContextFull:
            self.limit = Limit.CONTEXT
            return None
        self.turns.append(
            Turn(
                context_ids=context,
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                policy_versions=sample.policy_versions,
                stop=sample.stop,
            )
        )
        self.text.append(("model", self.arena.dialogue.text(sample.token_ids)))
        if sample.stop is not StopReason.STOP:
            self.limit = _LIMIT_OF_STOP[sample.stop]
            self.messages.append(Message(role=Role.ASSISTANT, text=self.arena.dialogue.reply(sample.token_ids)))
            return None
        actions = self.arena.dialogue.parse(sample.token_ids, sample.stop)
        calls = tuple(ToolCall(name=action.tool, arguments=json.dumps(action.arguments)) for action in actions if isinstance(action, Call))
        self.messages.append(Message(role=Role.ASSISTANT, text=self.arena.dialogue.reply(sample.token_ids), calls=calls))
        observations = []
        for action in actions:
            reaction = await self._react(action)
            if reaction is None or reaction.over:
                return None
            role = Role.USER if isinstance(action, Answer) else Role.TOOL
            self.messages.append(Message(role=role, text=reaction.text))
            self.text.append(("tool", reaction.text))
            observations.append(Observation(text=reaction.text, ok=reaction.ok))
        return observations

    async def _opening(self) -> tuple[Message, ...]:
        """How the conversation begins; the environment's side of it is there from here on."""
        environment = interactive(self.arena.environment)
        if environment is None:
            return self.task.opening
        async with self._asking(Stage.SANDBOX):
            self.interaction = await environment.interact(self.task, derive(self.arena.seed, "environment", self.task.id))
            own = self.interaction.opening
        if own:
            self.text[0] = ("task", "\n".join(message.text for message in own))
        return own or self.task.opening

    async def _react(self, action: Answer | Call | Malformed) -> Reaction | None:
        """What comes of one action. None: it was the answer."""
        if isinstance(action, Malformed):
            return self._refuse(action.reason)
        if isinstance(action, Call):
            return await self._call(action)
        if self.interaction is not None:
            async with self._asking(Stage.COMMAND):
                reaction = await self.interaction.reply(self.messages[-1].text)
            if reaction is not None and not reaction.over:
                return self._cut(reaction)
        self.answer = action.text
        return await self._next_step()

    async def _next_step(self) -> Reaction | None:
        """After an answer: a further step's instruction, or None when the episode is over. Checking a step is grading."""
        environment = self.arena.environment
        if not isinstance(environment, GoesOn):
            return None
        sandbox = await self._ready_sandbox()
        submission = Submission(answer=self.answer, commands=tuple(self.commands), messages=tuple(self.messages))
        with self.timeline.span(Stage.GRADING), boundary(Boundary.GRADER), self._own_time():
            message = await environment.next_message(self.task, submission, sandbox)
        if message is None:
            return None
        self.answer = None
        return Reaction(text=message)

    async def _call(self, action: Call) -> Reaction:
        tool = self.offer.tool(action.tool)
        if tool is None:
            near = difflib.get_close_matches(action.tool, [known.name for known in self.offer.tools], n=1, cutoff=0.0)
            return self._refuse(f"there is no tool {action.tool!r}" + (f"; call {near[0]}" if near else ""))
        if tool == BASH:
            script = action.arguments.get("command")
            if not isinstance(script, str) or "\0" in script:
                return self._refuse("bash takes one argument, command: a script without NUL bytes")
            return await self._run(script, ("bash", "-c", script))
        if tool.argv:
            given = json.dumps(action.arguments)
            return await self._run(f"{tool.name} {given}", tool.argv, given.encode())
        if self.interaction is None:
            raise Broken(InfrastructureFailure(boundary=Boundary.ENVIRONMENT, reason=f"nobody serves tool {tool.name}", retryable=False))
        async with self._asking(Stage.COMMAND):
            return self._cut(await self.interaction.call(tool.name, action.arguments))

    @contextlib.asynccontextmanager
    async def _asking(self, stage: Stage) -> AsyncIterator[None]:
        """The environment is asked something."""
        with self.timeline.span(stage):
            async with environment_boundary(self.arena.limits.environment_timeout_s):
                yield

    def _cut(self, reaction: Reaction) -> Reaction:
        return msgspec.structs.replace(reaction, text=reaction.text[: self.arena.limits.max_observation])

    def _refuse(self, reason: str) -> Reaction:
        self.malformed += 1
        return Reaction(text=reason, ok=False)

    async def _run(self, script: str, argv: tuple[str, ...], stdin: bytes = b"") -> Reaction:
        """A command, or a tool that is a program, in the agent's sandbox."""
        limits = self.arena.limits
        sandbox = await self._ready_sandbox()
        with self.timeline.span(Stage.COMMAND), boundary(Boundary.EXEC):
            try:
                done = await sandbox.run.aio(
                    *argv,
                    timeout=limits.command_timeout_s,
                    stdin=stdin,
                    max_output=4 * limits.max_observation,
                    merge_stderr=True,
                )
            except ExecFailed as error:
                return self._could_not_start(script, error)
        output = done.stdout.decode("utf-8", "replace")[: limits.max_observation]
        if done.timed_out:
            output += f"\n[stopped after {limits.command_timeout_s:g} s]"
        self.commands.append(Command(script=script, exit_code=None if done.timed_out else done.exit_code, output=output))
        if done.gone is not None:  # its time or money ran out under the command; asking the model on would be for nothing
            with boundary(Boundary.EXEC):
                raise SandboxGone(sandbox.name, done.gone)
        return Reaction(text=output, ok=done.exit_code == 0 and not done.timed_out)

    def _could_not_start(self, script: str, error: ExecFailed) -> Reaction:
        """A live sandbox in which a command cannot be started is the agent's doing (its processes fill the limit, it locked its own folder,
        its script is too long): a failed command, or an agent could take its bad episodes out of training."""
        reason = str(error.strerror or error)
        self.commands.append(Command(script=script, exit_code=_CANNOT_START, output=reason))
        return Reaction(text=reason, ok=False)

    async def _ready_sandbox(self) -> Sandbox:
        """The episode's sandbox, made when the first command needs it."""
        if self.sandbox is None:
            with self.timeline.span(Stage.SANDBOX):
                with boundary(Boundary.SANDBOX_CREATE):
                    self.sandbox = await self._take(self.arena.environment.files(self.task))
                with boundary(Boundary.SETUP):
                    await self.arena.environment.prepare(self.task, self.sandbox)
        return self.sandbox

    async def _take(self, files: Mapping[str, bytes]) -> Sandbox:
        environment = self.arena.environment
        if not isinstance(environment, ChoosesSandboxes):
            return await self.arena.sandboxes.take(files)
        return await self.arena.sandboxes.take(files, await environment.sandbox_for(self.task))

    async def judge(self) -> Verdict | Submission:
        """The verdict on what the agent left, after its processes are dead; what there is to grade, where whole groups are graded."""
        submission = Submission(answer=self.answer, commands=tuple(self.commands), limit=self.limit, messages=tuple(self.messages))
        if self.interaction is not None:
            with self.timeline.span(Stage.GRADING):
                submission = msgspec.structs.replace(submission, record=await self._finished(self.interaction, submission))
        if isinstance(self.arena.environment, GradesGroups):
            return submission
        with self.timeline.span(Stage.GRADING), boundary(Boundary.GRADER):
            return await grade_episode(
                self.arena.environment,
                self.task,
                submission,
                self.sandbox,
                timeout_s=self.arena.limits.grading_timeout_s,
                health=self.arena.health,
                retries=self.arena.limits.retries,
                meter=self.meter,
            )

    async def _finished(self, interaction: Interaction, submission: Submission) -> bytes:
        """What the environment's side makes of its episode. Where something that it asked broke, it scores the same episode again."""
        broke, patience_s = None, self.arena.limits.grading_timeout_s
        retries = self.arena.limits.retries if finishes_again(interaction) else 0
        for left in range(retries, -1, -1):
            self.meter.begin()
            try:
                async with environment_boundary(patience_s, Boundary.GRADER):
                    record = await interaction.finish(submission)
            except Broken as error:
                broke = error
            failed = self.meter.failure
            if failed is None and broke is None:
                return record
            if failed is None or self.meter.lasting is not None or not (failed.retryable and left):
                break
            broke, self.meter.gradings = None, self.meter.gradings + 1
        if failed is None:
            assert broke is not None
            failed = broke.failure
        elif retries and self.meter.lasting is None:
            failed = msgspec.structs.replace(failed, retryable=False)
        self.arena.health.record(failed, called=True)
        raise Broken(failed) from broke

    async def leave(self) -> None:
        """Ends the environment's side, whatever it says to that: the verdict stands."""
        if self.interaction is None:
            return
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self.interaction.close()
        except Exception:  # noqa: BLE001 - the verdict is there already, and this changes nothing of it
            _log.warning("the environment's side of an episode of %s did not end cleanly", ascii(self.task.id), exc_info=True)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            turns=tuple(self.turns),
            commands=tuple(self.commands),
            spans=self.timeline.spans,
            limit=self.limit,
            malformed_calls=self.malformed,
            answer=self.answer,
            text=tuple(self.text),
        )


class Ungraded:
    """An attempt that came to its end, whose verdict depends on the others of its group."""

    def __init__(self, state: _Attempt, place: Place, submission: Submission) -> None:
        self.submission = submission
        self.timeline = state.timeline
        self.meter = state.meter
        self._state = state
        self._place = place

    def graded(self, verdict: Verdict) -> Episode:
        """The episode, once its verdict is known."""
        return _episode(self._state, self._place, verdict)


async def attempt(arena: Arena, task: Task, place: Place, sampling: Sampling) -> Episode | Ungraded:
    """Runs one attempt to its verdict, or to its end where whole groups are graded.

    Raises only what ends the run (EngineDied, IsolationUnavailable, cancellation).
    """
    state = _Attempt(arena, task, sampling)
    async with contextlib.AsyncExitStack() as held:
        with state.timeline.span(Stage.QUEUE):
            await held.enter_async_context(episode_turn(arena.environment))
            session = await arena.model.session(seed=derive(arena.seed, "episode", place.group, place.index, place.attempt))
        with metered(state.meter):
            ended = await _played(state, session)
    return Ungraded(state, place, ended) if isinstance(ended, Submission) else _episode(state, place, ended)


def _episode(state: _Attempt, place: Place, verdict: Verdict) -> Episode:
    return Episode(
        group=place.group,
        index=place.index,
        task_id=state.task.id,
        trajectory=state.trajectory(),
        verdict=verdict,
        attempt=place.attempt,
        gradings=state.meter.gradings,
        judge_calls=tuple(state.meter.calls),
    )


async def _played(state: _Attempt, session: Session) -> Verdict | Submission:
    """The verdict, or what there is to grade; everything that the attempt held is let go of."""
    try:
        await state.play(session)
        await session.close()
        return await state.judge()
    except Broken as broke:
        asked = state.meter.failure  # what the environment asked broke before it did
        return broke.failure if asked is None or asked.boundary is broke.failure.boundary else asked
    finally:
        if state.sandbox is not None:  # before anything is awaited: a run that ends meanwhile would leave it behind
            state.arena.sandboxes.give_back(state.sandbox)
        try:
            await asyncio.shield(session.close())
        finally:
            await asyncio.shield(state.leave())
