"""A command of a guest, as the same `Process` as any other. In: the guest's notices, which carry its output. Out: the same streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sandmill.errors import ExecTimeout, SandboxGone
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.dual import dual
from sandmill.sandboxes.process import Capture, Process
from sandmill.sandboxes.streams import Input

START_S: Final = 60.0
_PIECE: Final = 48 * 1024
_WINDOW: Final = 256 * 1024
"""Bytes on their way to a command that has not read them."""


class GuestInput(Input):
    """Standard input that goes to the guest in pieces; it says how much the command has taken."""

    def __init__(self, agent: Agent, id: int, *, open: bool) -> None:
        super().__init__(asyncio.get_running_loop(), -1)
        self._agent = agent
        self._id = id
        self._open = open
        self._sent = self._taken = 0
        self._moved = asyncio.Event()

    @dual
    async def write(self, data: str | bytes) -> None:
        """Writes all of `data`; waits while the command does not read. Raises BrokenPipeError when it no longer does."""
        whole = wire.encode(data)
        async with self._turn:
            for start in range(0, len(whole), _PIECE):
                await self._room()
                piece = whole[start : start + _PIECE]
                self._agent.send(wire.agent_request(wire.INPUT, self._id, piece))
                self._sent += len(piece)

    @dual
    async def close(self) -> None:
        """The command sees end of file. Idempotent."""
        self.shut()

    def shut(self) -> None:
        """`close` for the loop's own thread."""
        if self._open:
            self._agent.send(wire.agent_request(wire.INPUT, self._id))
            self.end()

    def end(self) -> None:
        """Nobody reads any more."""
        self._open = False
        self._moved.set()

    def taken(self, reply: wire.AgentReply) -> None:
        """The guest says how far the command has read, or that it never will again."""
        self._taken = max(self._taken, reply.user_us)
        if reply.status:
            self.end()
        self._moved.set()

    async def _room(self) -> None:
        while self._open and self._sent - self._taken >= _WINDOW:
            self._moved.clear()
            await self._moved.wait()
        if not self._open:
            raise BrokenPipeError("the command's standard input is closed")


class BoundedCapture(Capture):
    """A captured command whose agent is not believed to bound its output."""

    __slots__ = ("_room",)

    def __init__(self, future: asyncio.Future[wire.AgentReply], max_output: int) -> None:
        super().__init__(future)
        self._room = 2 * max(1, max_output)

    def reply(self, reply: wire.AgentReply, fd: int) -> bool:
        """Listener: a piece of output or the end. Raises MalformedError for more than was asked for."""
        self._room -= len(reply.data)
        if self._room < 0:
            raise wire.MalformedError("more output than was asked for")
        return super().reply(reply, fd)


class GuestProcess(Process):
    """A command on a backend's machine."""

    def __init__(
        self, agent: Agent, give_up: Callable[[str], None], *, with_input: bool, text: bool, max_output: int, timeout_s: float | None
    ) -> None:
        super().__init__(agent, -1, -1, -1, text=text, max_output=max_output, timeout_s=timeout_s)
        self._give_up = give_up
        self.stdout.fed()
        self.stderr.fed()
        self._input = GuestInput(agent, self.id, open=with_input)
        self.stdin = self._input

    def reply(self, reply: wire.AgentReply, fd: int) -> bool:
        """Listener: the guest's notices."""
        if reply.op == wire.OUTPUT:
            self.stdout.take(reply.data[: reply.out_bytes])
            self.stderr.take(reply.data[reply.out_bytes :])
            return False
        if reply.op == wire.INPUT:
            self._input.taken(reply)
            return False
        if reply.op == wire.EXIT:
            self._end()
        return super().reply(reply, fd)

    async def begin(self) -> None:
        """Waits until the command runs. Raises ExecFailed, SandboxGone."""
        started, _ = await asyncio.wait({self._started}, timeout=START_S)
        if not started:
            self._give_up(f"its agent started no command within {START_S:g} s")
        await super().begin()

    async def _kill(self) -> None:
        """A sandbox whose command survives its kill ends: whoever waits for it would wait for ever."""
        try:
            await super()._kill()
        except ExecTimeout:
            self._give_up("a command could not be killed")
            raise

    def gone(self, error: SandboxGone) -> None:
        """Listener: the sandbox ended under the command."""
        self._end()
        super().gone(error)

    def _end(self) -> None:
        """All its output has come: the guest sends it before the exit."""
        self._input.end()
        self.stdout.close()
        self.stderr.close()
