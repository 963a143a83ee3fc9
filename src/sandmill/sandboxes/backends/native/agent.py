"""The conversation with one sandbox's agent. In: operations. Out: futures and exit notices; after the sandbox's end, its reason.

Everything that arrives is hostile until checked: a malformed or unexpected reply ends the sandbox.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Protocol

from sandmill.errors import SandboxGone
from sandmill.sandboxes.backends.native import wire


class Listener(Protocol):
    """Whoever waits for replies under one id."""

    def reply(self, reply: wire.AgentReply, fd: int) -> bool:
        """Takes a reply (and owns `fd`); True when it was the last one."""
        ...

    def gone(self, error: SandboxGone) -> None:
        """The sandbox has ended; nothing more will come."""
        ...


class Link(Protocol):
    """The way to an agent. What comes back goes to the callbacks that it was made with."""

    def send(self, message: wire.Message, *, close: tuple[int, ...] = ()) -> None:
        """Sends or queues. `close` are descriptors in the message that are ours no longer; its memfd never is."""
        ...

    def close(self) -> None:
        """Ends the conversation without a word. Idempotent."""
        ...


Connect = Callable[[Callable[[bytes, int], None], Callable[[], None]], Link]
"""Makes a link from `on_message(data, fd)`, which owns the descriptor (-1: none), and `on_end()`."""


class _One:
    """A single reply, as a future."""

    __slots__ = ("future", "op")

    def __init__(self, op: int, future: asyncio.Future[tuple[wire.AgentReply, int]]) -> None:
        self.op = op
        self.future = future

    def reply(self, reply: wire.AgentReply, fd: int) -> bool:
        if reply.op != self.op:
            raise wire.MalformedError(f"a reply of kind {reply.op} to a request of kind {self.op}")
        if not self.future.done():
            self.future.set_result((reply, fd))
        elif fd >= 0:
            os.close(fd)
        return True

    def gone(self, error: SandboxGone) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # whoever waited may have been cancelled: nobody owes this a look


class Agent:
    """One sandbox's agent, on the sandbox loop.

    `on_end(why)` is called once when the conversation breaks from the other side; `hurry(True)` when a command's tree is about
    to be killed and `hurry(False)` when it is dead: under a cpu quota the tree would delay its own end.
    """

    def __init__(self, connect: Connect, on_end: Callable[[str], None], hurry: Callable[[bool], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[int, Listener] = {}
        self._last = 0
        self._on_end = on_end
        self._hurry = hurry
        self._killing: set[int] = set()
        self._closed: SandboxGone | None = None
        self._link = connect(self._message, lambda: on_end(""))

    def expect_ready(self) -> asyncio.Future[tuple[wire.AgentReply, int]]:
        """The agent's first word, which answers no request (id 0)."""
        future = self._loop.create_future()
        self._listeners[0] = _One(wire.READY, future)
        return future

    def listen(self, listener: Listener) -> int:
        """A fresh id under which `listener` gets replies."""
        self._last += 1
        self._listeners[self._last] = listener
        return self._last

    def forget(self, id: int) -> None:
        """Nothing was sent under this id after all."""
        self._listeners.pop(id, None)

    def send(self, message: wire.Message, *, close: tuple[int, ...] = ()) -> None:
        """Sends a message made with an id of `listen`."""
        self._link.send(message, close=close)

    def kill_tree(self, id: int) -> None:
        """Has a command and everything it started killed; its end is reported as any other. Idempotent."""
        if id not in self._listeners:
            return
        if not self._killing:
            self._hurry(True)
        self._killing.add(id)
        self._link.send(wire.agent_request(wire.KILL_TREE, id))

    async def ask(
        self, op: int, payload: bytes = b"", *, flags: int = 0, who: int = 0, first: int = 0, second: int = 0
    ) -> tuple[wire.AgentReply, int]:
        """One request, one reply. Raises SandboxGone, also when the conversation is over: nobody would answer."""
        if self._closed is not None:
            raise SandboxGone(self._closed.sandbox, self._closed.reason)
        future: asyncio.Future[tuple[wire.AgentReply, int]] = self._loop.create_future()
        id = self.listen(_One(op, future))
        self._link.send(wire.agent_request(op, id, payload, flags=flags, who=who, first=first, second=second))
        return await future

    @property
    def commands(self) -> list[int]:
        """The ids of commands that have not ended."""
        return [id for id, listener in self._listeners.items() if not isinstance(listener, _One)]

    def close(self, error: SandboxGone) -> None:
        """Ends the conversation from this side and tells everyone who waits. Idempotent."""
        self._link.close()
        self._closed = error
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.gone(error)

    def _dead(self, id: int) -> None:
        if id in self._killing:
            self._killing.discard(id)
            if not self._killing:
                self._hurry(False)

    def _message(self, data: bytes, fd: int) -> None:
        try:
            reply = wire.parse_reply(data)
            listener = self._listeners.get(reply.id)
            if listener is None and 0 < reply.id <= self._last and _may_come_twice(reply):
                if fd >= 0:
                    os.close(fd)
                return
            if listener is None and reply.op == wire.READY and reply.flags & wire.NOT_STARTED:
                self._break_off(fd, f"it could not be closed in: {reply.failure!a}")
                return
            if listener is None:
                raise wire.MalformedError(f"a reply to request {reply.id}, which nobody made")
            if listener.reply(reply, fd):
                self._listeners.pop(reply.id, None)
                self._dead(reply.id)
        except wire.MalformedError as error:
            self._break_off(fd, f"its agent broke the protocol: {error}")

    def _break_off(self, fd: int, why: str) -> None:
        if fd >= 0:
            os.close(fd)
        self._link.close()
        self._on_end(why)


def _may_come_twice(reply: wire.AgentReply) -> bool:
    """A command that is killed in the moment it ends is reported by its supervisor and by its death; so is whatever else the agent had a
    process of its own do, as lost (EIO)."""
    return reply.op in (wire.EXIT, wire.OUTPUT) or reply.status == errno.EIO
