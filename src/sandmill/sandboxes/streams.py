"""A running command's input and output. In: a pipe or terminal from inside a sandbox. Out: bytes or text as it comes."""

from __future__ import annotations

import asyncio
import codecs
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, Self

from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.dual import Dual, block_on, dual

_CHUNK: Final = 65536
_FLOOD_BYTES: Final = 64 << 20


class Output:
    """One output stream. Reading consumes; text is UTF-8 with U+FFFD for what is not."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fd: int, limit: int, text: bool, on_flood: Callable[[], None] | None = None
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._limit = limit
        self._text = text
        self._on_flood = on_flood
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._dropped = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._changed = asyncio.Event()
        if fd >= 0:
            os.set_blocking(fd, False)
            loop.add_reader(fd, self._readable)
        self.closed = asyncio.Event()
        if fd < 0:
            self.closed.set()

    def fed(self) -> Self:
        """Open without a descriptor: `take` brings what comes, until `close`."""
        self.closed.clear()
        return self

    @property
    def truncated(self) -> bool:
        """Some output was dropped because more than `max_output` unread bytes had come."""
        return self._dropped > 0

    @dual
    async def read(self) -> str | bytes:
        """Everything up to the end of the command: str, or bytes when it was started with `text=False`."""
        data = await self._read_all()
        return self._decoder.decode(data, True) if self._text else data

    @dual
    async def read_bytes(self) -> bytes:
        """Everything up to the end of the command, as the command wrote it."""
        return await self._read_all()

    async def _read_all(self) -> bytes:
        await self.closed.wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._held = 0
        return data

    async def _next(self) -> str | bytes | None:
        """The next piece as it came, None at the end."""
        while not self._chunks:
            if self.closed.is_set():
                rest = self._decoder.decode(b"", True) if self._text else ""
                return rest or None
            self._changed.clear()
            await self._changed.wait()
        data = self._chunks.popleft()
        self._held -= len(data)
        return self._decoder.decode(data) if self._text else data

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        step = Dual(self._next)
        while (piece := await step.aio()) is not None:
            if piece:
                yield piece

    def __iter__(self) -> Iterator[str | bytes]:
        while (piece := block_on(self._next())) is not None:
            if piece:
                yield piece

    def close(self) -> None:
        """Stops reading; what came is kept. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self.closed.set()
        self._changed.set()

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose other side is gone
            data = b""
        if not data:
            self.close()
            return
        self.take(data)

    def take(self, data: bytes) -> None:
        """A piece has come: it is kept while there is room."""
        kept = data[: max(0, self._limit - self._held)]
        self._dropped += len(data) - len(kept)
        if kept:
            self._held += len(kept)
            self._chunks.append(kept)
            self._changed.set()
        if self._dropped > _FLOOD_BYTES and self._on_flood is not None:
            self._on_flood()


class Input:
    """The command's standard input. Writing waits while the command does not read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._turn = asyncio.Lock()
        if fd >= 0:
            os.set_blocking(fd, False)

    @dual
    async def write(self, data: str | bytes) -> None:
        """Writes all of `data`. Raises BrokenPipeError when the command no longer reads."""
        view = memoryview(wire.encode(data))
        async with self._turn:
            while view:
                if self._fd < 0:
                    raise BrokenPipeError("the command's standard input is closed")
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    await self._writable()

    @dual
    async def close(self) -> None:
        """The command sees end of file. Idempotent."""
        self.shut()

    def shut(self) -> None:
        """`close` for the loop's own thread."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self._fd, _settle, ready)
        try:
            await ready
        finally:
            if self._fd >= 0:
                self._loop.remove_writer(self._fd)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
