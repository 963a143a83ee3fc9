"""Environments that take part in the dialogue. In: a task; what the model says and calls. Out: what it is told, until the episode is over.

An environment without any of this is asked nothing between its prompt and its grade, and its agent has bash in a sandbox.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, cast, runtime_checkable

import msgspec

from sandmill.environments.environment import Environment
from sandmill.environments.task import Message, Submission, Task
from sandmill.environments.tools import BASH, Tool


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model may do in every task of an environment. Without tools its first reply is its answer."""

    tools: tuple[Tool, ...] = (BASH,)
    instructions: str | None = None
    """The system message, where a task's opening has none; None: words that fit the tools."""

    def tool(self, name: str) -> Tool | None:
        """The tool of that name."""
        return next((tool for tool in self.tools if tool.name == name), None)


class Reaction(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call or a reply. `ok` is false when it failed; with `over` the episode ends here and nobody reads `text`."""

    text: str
    ok: bool = True
    over: bool = False


class Interaction(Protocol):
    """The environment's side of one episode. Raises whatever broke: an InfrastructureFailure at the environment's boundary."""

    @property
    def opening(self) -> tuple[Message, ...]:
        """How the conversation begins; empty: as the task says."""
        ...

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Reaction:
        """A tool that the environment carries out. A call that is wrong is a Reaction that says so; it goes back to the model."""
        ...

    async def reply(self, text: str) -> Reaction | None:
        """The model said something and called no tool. None: that was its answer."""
        ...

    async def finish(self, submission: Submission) -> bytes:
        """The episode is over: what the grader will find in `Submission.record`."""
        ...

    async def close(self) -> None:
        """Lets go of everything, also when the episode broke. Idempotent."""
        ...


class Interactive(Protocol):
    """The optional members of an environment (see `offer_of` and `interactive`)."""

    @property
    def offer(self) -> Offer: ...

    async def interact(self, task: Task, seed: int) -> Interaction:
        """Begins one episode; `seed` is all the chance it may use."""
        ...


@runtime_checkable
class LimitedEpisodes(Protocol):
    """An environment that plays a limited number of episodes at once. Waiting for a turn counts against no limit of the episode."""

    def episode_turn(self) -> AbstractAsyncContextManager[object]: ...


def episode_turn(environment: Environment) -> AbstractAsyncContextManager[object]:
    """Held while an episode is played."""
    return environment.episode_turn() if isinstance(environment, LimitedEpisodes) else contextlib.nullcontext()


def finishes_again(interaction: Interaction) -> bool:
    """Whether `finish` may be called once more on an episode that it has scored or failed to score."""
    return bool(getattr(interaction, "finishes_again", False))


def offer_of(environment: Environment) -> Offer:
    """The environment's own offer, or bash."""
    return cast("Interactive", environment).offer if hasattr(environment, "offer") else Offer()


def interactive(environment: Environment) -> Interactive | None:
    """The environment, where it takes part in the dialogue."""
    return cast("Interactive", environment) if hasattr(environment, "interact") else None
