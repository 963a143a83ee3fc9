"""The environment's side of one episode, played by a package in its sandbox. In: what the model says and calls. Out: the package's answers.

One process of the package belongs to each episode, so that its state, its random generators and its end are nobody else's. What the
package's grader makes of the episode comes out of that process at the end and travels as `Submission.record`. Once anything of it broke
no more is asked: half an episode has no score.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from sandmill.environments.interaction import Reaction
from sandmill.environments.packages.asked import AskedSession
from sandmill.environments.packages.loaded import Raised
from sandmill.environments.packages.protocol import Message as Said
from sandmill.environments.packages.protocol import Opened, Score, Step
from sandmill.environments.task import Message, Role, Submission
from sandmill.environments.tools import Tool
from sandmill.environments.verdicts import reason_of
from sandmill.errors import GraderFailed

M = TypeVar("M", bound=msgspec.Struct)
ANSWER_S: Final = 600.0
"""The longest that a package may think about one call; the runner's own limits are shorter."""
DEEPEST: Final = 100
"""Lists and mappings in one another that a call's arguments may have: parsers of packages give up at some depth."""
_LONGEST_OBSERVATION: Final = 1 << 20


class Ending(msgspec.Struct, frozen=True):
    """How a package is asked for the end of an episode, and what it answers."""

    method: str = "finish"
    kind: type[msgspec.Struct] = Score


class ForeignInteraction:
    """See `Interaction`. `release` gives the session's place back."""

    ending = Ending()
    finishes_again = False
    """See `finishes_again`."""

    def __init__(self, session: AskedSession, opening: tuple[Message, ...], release: Callable[[], None]) -> None:
        self.opening = opening
        self._session = session
        self._release = release
        self._broken: Exception | None = None
        self._running: asyncio.Task[Any] | None = None

    @classmethod
    async def begin(
        cls, session: AskedSession, row: msgspec.Raw, seed: int, known: Sequence[Tool], release: Callable[[], None]
    ) -> ForeignInteraction:
        """Opens the episode of a row. Raises GraderFailed, TimeoutError; then nothing of it is left."""
        try:
            opened = await session.call("open", {"row": row}, Opened, timeout_s=ANSWER_S, seed=seed)
            names = {tool.name for tool in known}
            for tool in tools_of(opened.tools):
                if tool.name not in names:
                    raise GraderFailed(f"an episode brings a tool {tool.name} that its package did not announce")
            return cls(session, messages_of(opened.prompt), release)
        except BaseException:
            await asyncio.shield(session.close())
            release()
            raise

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Reaction:
        """See `Interaction`. Arguments that cannot be passed on are the model's mistake, or it could break episodes at will."""
        if _too_deep(arguments):
            return Reaction(text=f"these arguments cannot be passed on: they are nested deeper than {DEEPEST}", ok=False)
        try:
            sent = msgspec.Raw(msgspec.json.encode(arguments))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return Reaction(text=f"these arguments cannot be passed on: {reason_of(error)}", ok=False)
        return _reaction(await self._ask("call", {"tool": tool, "arguments": sent}, Step))

    async def reply(self, text: str) -> Reaction | None:
        """See `Interaction`."""
        return _reaction(await self._ask("reply", {"text": _sound(text)}, Step))

    async def finish(self, submission: Submission) -> bytes:
        """What the package says to the end: a score, as `score_of` reads it, unless `ending` is another. Where it raised, the episode is
        still there."""
        said = [
            {
                "role": str(message.role),
                "text": _sound(message.text),
                "calls": [{"name": call.name, "arguments": call.arguments} for call in message.calls],
            }
            for message in submission.messages
        ]
        answer = None if submission.answer is None else _sound(submission.answer)
        params = {"answer": answer, "limit": None if submission.limit is None else str(submission.limit), "messages": said}
        return msgspec.json.encode(await self._ask(self.ending.method, params, self.ending.kind))

    async def close(self) -> None:
        """See `Interaction`."""
        self._broken = self._broken or GraderFailed("the episode is over")
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self._running
        release, self._release = self._release, _nothing
        try:
            await self._session.close()
        finally:
            release()

    async def _ask(self, method: str, params: Mapping[str, Any], kind: type[M]) -> M:
        """One call, after whatever still runs: an episode whose time is over is graded on what it had become by then."""
        if self._running is not None:
            await asyncio.wait({self._running})
        if self._broken is not None:
            raise self._broken
        self._running = task = asyncio.ensure_future(
            self._noted(self._session.call(method, params, kind, timeout_s=ANSWER_S), last=method == "finish")
        )
        found: M = await asyncio.shield(task)
        return found

    async def _noted(self, work: Coroutine[Any, Any, M], *, last: bool) -> M:
        try:
            return await work
        except Exception as error:
            if not (last and isinstance(error, Raised)):
                self._broken = error
            raise


def score_of(record: bytes) -> Score:
    """What `ForeignInteraction.finish` wrote."""
    return msgspec.json.decode(record, type=Score)


def tools_of(definitions: Sequence[str]) -> tuple[Tool, ...]:
    """Function definitions of a package, as JSON text. Raises GraderFailed for what is none."""
    found: dict[str, Tool] = {}
    for text in definitions:
        try:
            definition = msgspec.json.decode(text, type=_Definition)
            function = definition.function or msgspec.convert(msgspec.json.decode(text), _Function)
            parameters = function.parameters or {"type": "object", "properties": {}}
            tool = Tool(name=function.name, description=function.description or "", parameters=msgspec.json.encode(parameters).decode())
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise GraderFailed(f"the package's tool {text[:80]!a} is none: {error}") from error
        if found.setdefault(tool.name, tool) != tool:
            raise GraderFailed(f"the package has two different tools of the name {tool.name}")
    return tuple(found.values())


def messages_of(prompt: str | Sequence[Said]) -> tuple[Message, ...]:
    """How a conversation begins; empty for an empty text. Raises GraderFailed for a role that is none."""
    if isinstance(prompt, str):
        return (Message.user(prompt),) if prompt else ()
    found = []
    for message in prompt:
        try:
            found.append(Message(role=Role("system" if message.role == "developer" else message.role), text=message.content))
        except ValueError:
            raise GraderFailed(f"a message of the package is said by {message.role[:40]!a}, which is no role") from None
    return tuple(found)


class _Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Definition(msgspec.Struct, frozen=True):
    function: _Function | None = None


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner = [one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, (Mapping, list))]
        level = [one for values in inner for one in values]
    return bool(level)


def _sound(text: str) -> str:
    """Text that UTF-8 can carry: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _reaction(step: Step) -> Reaction:
    return Reaction(text=step.observation[:_LONGEST_OBSERVATION], ok=step.ok, over=step.done)


def _nothing() -> None:
    pass


__all__ = ["ANSWER_S", "Ending", "ForeignInteraction", "messages_of", "score_of", "tools_of"]
