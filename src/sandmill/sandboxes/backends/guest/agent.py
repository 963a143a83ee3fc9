"""The conversation with a guest's agent: as with any other, but nothing is waited for for ever, because in-sandbox root may stop it.

In: requests. Out: answers within ANSWER_S, or the sandbox's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from sandmill.errors import SandboxGone
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent, Connect

ANSWER_S: Final = 120.0
"""Removing a large folder takes its time."""
_Answer = TypeVar("_Answer")


class GuestAgent(Agent):
    """One guest's agent, on the sandbox loop."""

    def __init__(self, connect: Connect, on_end: Callable[[str], None]) -> None:
        super().__init__(connect, on_end, lambda on: None)

    async def ask(
        self, op: int, payload: bytes = b"", *, flags: int = 0, who: int = 0, first: int = 0, second: int = 0
    ) -> tuple[wire.AgentReply, int]:
        """One request, one reply. Raises SandboxGone, also when none comes in time."""
        return await self.in_time(super().ask(op, payload, flags=flags, who=who, first=first, second=second))

    async def in_time(self, answer: Awaitable[_Answer]) -> _Answer:
        """Raises SandboxGone when it takes longer than any answer may."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            why = f"its agent did not answer within {ANSWER_S:g} s"
            self._on_end(why)
            raise SandboxGone("", why) from None
