"""A guest's files as Python files. In: replies with a file's or folder's contents; a file that was written. Out: bytes, entries."""

from __future__ import annotations

import asyncio
import io
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Final

from sandmill.errors import SandboxGone
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.files import FileEntry

FOLDER: Final = 1
_LISTED: Final = struct.Struct("=2IQ")
_KINDS: Final = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))


class Reading:
    """Listener: the contents come in pieces, then the reply itself."""

    def __init__(self, limit: int) -> None:
        self.future: asyncio.Future[wire.AgentReply] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._pieces: list[bytes] = []
        self._bytes = 0

    @property
    def contents(self) -> bytes:
        """What came."""
        return b"".join(self._pieces)

    def reply(self, reply: wire.AgentReply, fd: int) -> bool:
        """A piece, or the end."""
        if reply.op == wire.OUTPUT and self._bytes + len(reply.data) <= self._limit:
            self._bytes += len(reply.data)
            self._pieces.append(reply.data)
            return False
        if reply.op != wire.OPEN:
            raise wire.MalformedError(f"a notice of kind {reply.op} with {len(reply.data)} bytes while a file was read")
        if not self.future.done():
            self.future.set_result(reply)
        return True

    def gone(self, error: SandboxGone) -> None:
        """The sandbox ended first."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()


def entries(listing: bytes) -> list[FileEntry]:
    """A folder's entries, sorted by name. Raises MalformedError."""
    return sorted(_entries(listing), key=lambda entry: entry.name)


def _entries(listing: bytes) -> Iterator[FileEntry]:
    at = 0
    while at < len(listing):
        try:
            mode, length, size = _LISTED.unpack_from(listing, at)
        except struct.error:
            raise wire.MalformedError("a listing that is cut") from None
        at += _LISTED.size + length
        if at > len(listing):
            raise wire.MalformedError("a listing that is cut")
        kind = next((kind for test, kind in _KINDS if test(mode)), "other")
        yield FileEntry(name=listing[at - length : at].decode("utf-8", "surrogateescape"), kind=kind, size_bytes=size)


class Held(io.BytesIO):
    """A file's contents; handed to `save` when closed."""

    def __init__(self, contents: bytes, save: Callable[[bytes], None]) -> None:
        super().__init__(contents)
        self._save = save

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._save(data)
