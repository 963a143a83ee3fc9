"""What processes wrote, kept. In: pieces as they come. Out: frames from any offset, also after the process, or the server, has ended.

An offset counts bytes of one stream, or of both in the order they came when no stream is named. At most `KEPT_BYTES` of a process
are kept; what comes after that is not, and the process's status says so.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Iterable
from typing import Final, NamedTuple

from sandmill.server.store import Store, pieces_of
from sandmill.server.tables import Piece

KEPT_BYTES: Final = 8 << 20
_FLUSH_S: Final = 0.05
_REST_S: Final = 10.0
_LARGEST_PIECE: Final = 1 << 18
STREAMS: Final = ("stdout", "stderr")


class Frame(NamedTuple):
    """Bytes of a stream, from `offset` on."""

    stream: str
    offset: int
    data: bytes


class Log:
    """One process's output. Grows until `finish`."""

    def __init__(self, process: str, pieces: Iterable[Piece] = ()) -> None:
        self.process = process
        self.size_bytes = 0
        self.truncated = False
        self.done = False
        self._frames: list[Frame] = []
        self._starts: list[int] = []
        self._lengths = dict.fromkeys(STREAMS, 0)
        self._changed = asyncio.Event()
        for piece in pieces:
            self._append(piece.stream, piece.data)

    @property
    def lengths(self) -> dict[str, int]:
        """Bytes of each stream so far."""
        return dict(self._lengths)

    @property
    def room(self) -> int:
        """Bytes that will still be kept."""
        return KEPT_BYTES - self.size_bytes

    def add(self, stream: str, data: bytes) -> bytes:
        """Appends what fits; returns what was kept."""
        kept = data[: max(0, self.room)]
        self.truncated |= len(kept) < len(data)
        if kept:
            self._append(stream, kept)
            self._changed.set()
        return kept

    def finish(self) -> None:
        """Nothing more will come. Idempotent."""
        self.done = True
        self._changed.set()

    def frames(self, stream: str | None, after: int, most_bytes: int) -> list[Frame]:
        """From offset `after` on, up to about `most_bytes`."""
        out: list[Frame] = []
        taken, first = 0, 0 if stream is not None else max(0, bisect.bisect_right(self._starts, after) - 1)
        for place in range(first, len(self._frames)):
            frame = self._frames[place]
            offset = frame.offset if stream is not None else self._starts[place]
            skip = max(0, after - offset)
            if (stream is not None and frame.stream != stream) or skip >= len(frame.data):
                continue
            out.append(Frame(frame.stream, offset + skip, frame.data[skip:]))
            taken += len(frame.data) - skip
            if taken >= most_bytes:
                break
        return out

    async def wait(self, seconds: float) -> None:
        """Until something changes, or that long."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def _append(self, stream: str, data: bytes) -> None:
        self._frames.append(Frame(stream, self._lengths[stream], data))
        self._starts.append(self.size_bytes)
        self._lengths[stream] += len(data)
        self.size_bytes += len(data)


class Outputs:
    """The logs of all processes; those of ended ones are read back from the store when asked for."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._logs: dict[str, Log] = {}
        self._pending: dict[str, list[Piece]] = {}
        self._numbers: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, process: str) -> Log:
        """A log for a process that starts."""
        log = self._logs[process] = Log(process)
        return log

    async def resume(self, process: str) -> Log:
        """The log of a process that has outlived the last server, to go on with."""
        pieces = await self._store.read(pieces_of(process))
        log = self._logs[process] = Log(process, pieces)
        self._numbers[process] = max((piece.number for piece in pieces), default=-1) + 1
        return log

    def add(self, log: Log, stream: str, data: bytes) -> None:
        """Keeps a piece; it is on disk within some hundredths of a second."""
        if kept := log.add(stream, data):
            self._pending.setdefault(log.process, []).append(Piece(log.process, 0, stream, kept))
            if self._timer is None:
                self._timer = self._loop.call_later(_FLUSH_S, self._flush)

    def rest(self, log: Log) -> list[Piece]:
        """The process has ended: the pieces that are not on disk yet, to be written together with its end."""
        pieces = self._take(log.process)
        self._numbers.pop(log.process, None)
        log.finish()
        self._loop.call_later(_REST_S, self._drop, log)
        return pieces

    async def of(self, process: str) -> Log:
        """A process's log, ended or not."""
        log = self._logs.get(process)
        if log is None:
            log = self._logs[process] = Log(process, await self._store.read(pieces_of(process)))
            log.finish()
            self._loop.call_later(_REST_S, self._drop, log)
        return log

    def forget(self, process: str) -> None:
        """The process was deleted."""
        self._pending.pop(process, None)
        if (log := self._logs.pop(process, None)) is not None:
            log.finish()

    def _drop(self, log: Log) -> None:
        if self._logs.get(log.process) is log:
            del self._logs[log.process]

    def _flush(self) -> None:
        self._timer = None
        writes = [piece for process in list(self._pending) for piece in self._take(process)]
        if writes:
            self._store.submit(writes)

    def _take(self, process: str) -> list[Piece]:
        """Pending pieces with their numbers, neighbours of one stream made one."""
        joined: list[tuple[str, list[bytes]]] = []
        for piece in self._pending.pop(process, ()):
            if joined and joined[-1][0] == piece.stream and sum(map(len, joined[-1][1])) < _LARGEST_PIECE:
                joined[-1][1].append(piece.data)
            else:
                joined.append((piece.stream, [piece.data]))
        first = self._numbers.get(process, 0)
        self._numbers[process] = first + len(joined)
        return [Piece(process, first + place, stream, b"".join(parts)) for place, (stream, parts) in enumerate(joined)]
