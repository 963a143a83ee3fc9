"""An episode of a verifiers 0.4 package with an Env of its own: its `run` is played as it is, and asks us where it would ask its agent.

One agent and one conversation, by `agent.run(task)` or turn by turn by `agent.interaction(task)`: what was sampled is one line of tokens,
and a second conversation has no place on it. What the model wrote beside a call is known when all is over, and only then scored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any


class NotPlayed(TypeError):
    """The environment wants something that has no place in an episode here."""


class Directed:
    """One episode. `make` makes the conversation of a task, given what opens it where the task has no prompt (see verifiers_v1.Episode)."""

    def __init__(self, env: Any, task: Any, make: Callable[[Any, list[dict[str, Any]]], Any]) -> None:
        self.env, self.task, self.make = env, task, make
        self.talk: Any = None
        """The conversation, from the moment that the environment asks its agent for one."""
        self.claimed = False
        self.refused: NotPlayed | None = None
        self.asks: asyncio.Queue[str | None] = asyncio.Queue()
        """What the environment says to the model; None once it has nothing more to say."""
        self.told: asyncio.Queue[None] = asyncio.Queue()
        """The model's turn is over: what it said is in the conversation's trace."""
        self.ending: asyncio.Future[tuple[str | None, list[dict[str, Any]]]] = asyncio.get_running_loop().create_future()
        self.record: Any = None
        self.work = asyncio.ensure_future(self._episode())

    async def _episode(self) -> None:
        from verifiers.v1.agent import Agents
        from verifiers.v1.episode import EnvInfo, Episode
        from verifiers.v1.trace import TraceTask

        about = TraceTask(type=type(self.task).__name__, data=self.task.data, key=self.task.key, hash=self.task.hash)
        self.record = Episode(env=EnvInfo(id=self.env.config.env_id), task=about)
        agents = Agents(self.env.config, lambda name, config: Seat(self, name, config))
        await self.env.start()
        try:
            await self.env.setup(agents)
            await self.env.run(self.task, agents)
            if self.talk is None:
                raise NotPlayed("the environment's run asked no agent for anything")
            await self.env.finalize(self.task, self.record)
        finally:
            await self.env.stop()

    async def news(self) -> str | None:
        """What the environment says next; None when it says nothing more. Raises what broke it."""
        asked = asyncio.ensure_future(self.asks.get())
        await asyncio.wait({asked, self.work}, return_when=asyncio.FIRST_COMPLETED)
        if self.refused is not None:
            raise self.refused
        if asked.done():
            return asked.result()
        asked.cancel()
        self.work.result()
        return None

    async def begin(self) -> list[dict[str, Any]]:
        """The tools' definitions, once the environment has asked its agent. Raises what broke it."""
        await self.news()
        definitions: list[dict[str, Any]] = self.talk.tools.definitions
        return definitions

    async def reply(self, text: str) -> dict[str, Any]:
        """A turn of the model without a call. See protocol.Step."""
        self.talk.say(text, None)
        if self.talk.by_turns:
            await self.talk.stopped()
        return await self.over()

    async def over(self) -> dict[str, Any]:
        """The model's turn is over: what the environment makes of it."""
        if not self.talk.by_turns:
            self.talk.trace.stop("agent_completed")
            return {"observation": "", "done": True}
        self.told.put_nowait(None)
        said = await self.news()
        return {"observation": said or "", "done": said is None}

    async def score(self, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The environment's own end of the episode, and what it is worth."""
        self.ending.set_result((limit, messages))
        self.told.put_nowait(None)
        await self.work
        if self.refused is not None:
            raise self.refused
        score: dict[str, Any] = self.talk.result()
        return score


class Seat:
    """The environment's agent, which is the policy."""

    def __init__(self, episode: Directed, name: str, config: Any) -> None:
        self.trainable = True
        self.config, self._episode, self._name = config, episode, name

    async def run(self, task: Any, **more: Any) -> Any:
        """One conversation to its end: the trace."""
        talk = await self._talk(task, [], more)
        self._episode.asks.put_nowait("")
        await self._scored()
        return talk.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **more: Any) -> AsyncIterator[Interaction]:
        """One conversation, turn by turn."""
        held = Interaction(self, task, more)
        yield held
        await held.close()

    async def _talk(self, task: Any, opening: list[dict[str, Any]], more: dict[str, Any]) -> Any:
        episode = self._episode
        if episode.claimed or more.get("runtime") is not None or more.get("tools"):
            what = "asks for a second conversation" if episode.claimed else "lends its agent a machine or tools of another"
            episode.refused = NotPlayed(f"the environment {what}, and an episode here is one")
            raise episode.refused
        episode.claimed = True
        talk = episode.make(task, opening)
        await talk.begin()
        episode.talk = talk
        talk.trace.agent.name = self._name
        if more.get("on_trace") is not None:
            more["on_trace"](talk.trace)
        return talk

    async def _scored(self) -> None:
        limit, messages = await self._episode.ending
        await self._episode.talk.close(limit, messages)
        self._episode.record.traces.append(self._episode.talk.trace)


class Interaction:
    """See verifiers.v1.agent.Interaction."""

    def __init__(self, seat: Seat, task: Any, more: dict[str, Any]) -> None:
        self._seat, self._task, self._more = seat, task, more
        self._talk: Any = None
        self._closed = False

    @property
    def trace(self) -> Any:
        """The conversation's, once it has begun."""
        if self._talk is None:
            raise NotPlayed("the environment reads a conversation before its first turn")
        return self._talk.trace

    async def turn(self, message: Any = None) -> Any:
        """What the environment says, and what came of it."""
        from verifiers.v1.agent import Segment

        episode, said = self._seat._episode, spoken(message)
        if self._talk is None:
            prompted = self._task.data.prompt is not None
            if prompted == bool(said):
                raise ValueError("a task with a prompt opens its conversation itself, and one without by the first message")
            self._talk = await self._seat._talk(self._task, said, self._more)
            self._talk.by_turns = True
            since, text = len(self._talk.trace.nodes), ""
        elif episode.ending.done() or self._talk.trace.stop_condition is not None:
            return Segment(messages=[], terminated=True)
        else:
            since = len(self._talk.trace.nodes)
            for one in said:
                self._talk.note(one)
            text = "\n".join(one["content"] for one in said)
        episode.asks.put_nowait(text)
        await episode.told.get()
        made = [node.message for node in self._talk.trace.nodes[since:] if node.sampled or node.message.role == "tool"]
        ended = episode.ending.done() or not made
        return Segment(messages=[] if ended else made, root_reply=None if ended else self._talk.trace.root_reply, terminated=ended)

    async def close(self) -> Any:
        """Ends the conversation; it is scored once the model's words are known."""
        if self._talk is None:
            raise NotPlayed("the environment's interaction had no turn")
        if not self._closed:
            self._closed = True
            if not self._seat._episode.ending.done():
                self._talk.trace.stop("user_closed")
            self._seat._episode.asks.put_nowait(None)
            await self._seat._scored()
        return self._talk.trace


def spoken(message: Any) -> list[dict[str, Any]]:
    """A user's turn as messages."""
    if message is None:
        return []
    found = [message] if isinstance(message, str) else list(message)
    return [{"role": "user", "content": one} if isinstance(one, str) else text_of(one) for one in found]


def text_of(message: Any) -> dict[str, Any]:
    """One message with its content as text."""
    fields = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return {"role": str(fields.get("role", "user")), "content": content or ""}


def roles(env: Any) -> list[str]:
    """The agents that an environment declares."""
    from verifiers.v1.configs.agent import agent_config_fields

    return list(agent_config_fields(env.config))
