"""Bytes between two sockets. In: connected sockets. Out: what one side sends arrives at the other, no faster than it reads.

Every read counts against the sandbox's pace and lets others have a turn, so that neither a flood of tiny packets nor one long
download can keep the loop to itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, Final

_CHUNK: Final = 128 * 1024
_LARGEST_WINDOW: Final = 1024 * 1024


class Pace:
    """At most `per_s` of something per second, and `burst` at once. Whoever comes too early waits."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._at = 0.0

    async def take(self) -> None:
        """Waits for one's turn."""
        now = asyncio.get_running_loop().time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1
        self._at = now
        await asyncio.sleep(0 if self._left >= 0 else -self._left / self._per_s)


class Clock:
    """When bytes last moved on a connection."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self.touch()

    def touch(self) -> None:
        """Something moved just now."""
        self._last = asyncio.get_running_loop().time()

    @property
    def left_s(self) -> float:
        """Seconds until the connection counts as idle; not above zero when it does."""
        return self._last + self._idle_s - asyncio.get_running_loop().time()


class EndOfStream(Exception):
    """The other side has nothing more to send, where more was needed."""


class Stream:
    """One side of a connection. Owns its socket."""

    def __init__(self, end: socket.socket, pace: Pace, clock: Clock) -> None:
        self.end = end
        self.clock = clock
        self._pace = pace
        self._held = b""
        self._loop = asyncio.get_running_loop()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What a sandbox does not read waits in kernel memory that is not its own: a megabyte per side instead of several.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _CHUNK)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _LARGEST_WINDOW)

    async def receive(self, most: int = _CHUNK) -> bytes:
        """Up to `most` bytes as they come, b"" at the end. Raises OSError."""
        if self._held:
            data, self._held = self._held[:most], self._held[most:]
            return data
        await self._pace.take()
        data = await self._loop.sock_recv(self.end, most)
        self.clock.touch()
        return data

    async def until(self, mark: bytes, most: int) -> bytes | None:
        """Everything up to and with `mark`; None when that is not among the next `most` bytes. Raises EndOfStream, OSError."""
        data = b""
        while (at := data.find(mark)) < 0:
            if len(data) >= most:
                return None
            piece = await self.receive(most)
            if not piece:
                raise EndOfStream(data)
            data += piece
        self._held = data[at + len(mark) :] + self._held
        return data[: at + len(mark)]

    async def send(self, data: bytes) -> None:
        """Waits until the system has taken all of it. Raises OSError."""
        await self._loop.sock_sendall(self.end, data)
        self.clock.touch()

    def finish(self) -> None:
        """Tells the other side that no more will come."""
        self.end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Idempotent."""
        self.end.close()


async def readable(end: socket.socket) -> None:
    """Waits until something can be read or accepted. Unlike the loop's own accept, it holds nothing that a cancellation would lose."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(end, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(end)


async def pump(source: Stream, target: Stream) -> None:
    """Everything from one to the other, its end included. Raises OSError."""
    while data := await source.receive():
        await target.send(data)
    target.finish()


async def copy(source: Stream, target: Stream, count: int) -> None:
    """Exactly `count` bytes. Raises EndOfStream, OSError."""
    while count:
        data = await source.receive(min(count, _CHUNK))
        if not data:
            raise EndOfStream(data)
        await target.send(data)
        count -= len(data)


async def run_until_idle(clock: Clock, works: Sequence[Coroutine[Any, Any, None]], *, together: bool) -> None:
    """Runs `works` to their end; ends all when one fails, when nothing moves for too long, or (not `together`) when the first is done.

    Raises what the one that failed raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        while pending := [task for task in tasks if not task.done()]:
            done, _ = await asyncio.wait(pending, timeout=max(0, clock.left_s), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if (tasks[0].done() and not together) or (not done and clock.left_s <= 0):
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
