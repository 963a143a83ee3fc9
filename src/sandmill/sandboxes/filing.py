"""A sandbox's files while it lives. In: paths inside it, and whose rights count. Out: descriptors, contents, listings.

Everything is opened by the agent inside, with that user's rights; the host never follows a path of the sandbox's.
"""

from __future__ import annotations

import abc
import errno
import os
import stat
from collections.abc import Mapping
from typing import IO, Any

from sandmill.errors import SandboxFileError
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.commands import Commands
from sandmill.sandboxes.dual import dual
from sandmill.sandboxes.files import FileEntry, absolute, entry_of, file_error, open_flags, place
from sandmill.sandboxes.spec import SandboxSpec


class Filing(abc.ABC):
    """The part of `Sandbox` that reads and writes."""

    spec: SandboxSpec
    _commands: Commands

    @abc.abstractmethod
    def _live(self) -> Agent:
        """The agent. Raises SandboxGone."""

    @dual
    async def open(self, path: str, mode: str = "r", *, user: str = "user", encoding: str = "utf-8") -> IO[Any]:
        """Opens a file inside the sandbox, with `user`'s rights, as an ordinary Python file: modes r, w, a, x, with b and +.

        Missing parent folders are made when writing. Raises SandboxFileError; anything but a regular file is refused.
        """
        flags, binary = open_flags(mode)
        fd = await self._open(path, flags, user)
        os.set_blocking(fd, True)
        return os.fdopen(fd, mode.replace("x", "w"), encoding=None if binary else encoding, errors=None if binary else "replace")

    @dual
    async def read(self, path: str, *, user: str = "user", max_bytes: int | None = None) -> bytes:
        """A file's contents. Raises SandboxFileError, also when it is longer than `max_bytes`."""
        fd = await self._open(path, os.O_RDONLY, user)
        with os.fdopen(fd, "rb") as file:
            data = file.read(-1 if max_bytes is None else max_bytes + 1)
        if max_bytes is not None and len(data) > max_bytes:
            raise SandboxFileError(errno.EFBIG, f"{path} is longer than {max_bytes} bytes")
        return data

    @dual
    async def write(self, path: str, data: bytes | str, *, user: str = "user") -> None:
        """Writes one file, making missing parent folders."""
        await self._write({path: data}, user)

    @dual
    async def write_files(self, files: Mapping[str, bytes | str], *, user: str = "user") -> None:
        """Writes many files in one round trip, making missing parent folders. Raises SandboxFileError naming the first that failed."""
        await self._write(files, user)

    @dual
    async def list(self, path: str = ".", *, user: str = "user") -> list[FileEntry]:
        """A folder's entries, sorted by name."""
        fd = await self._open(path, os.O_RDONLY | os.O_DIRECTORY, user)
        try:
            with os.scandir(fd) as entries:
                return sorted((entry_of(entry) for entry in entries), key=lambda entry: entry.name)
        finally:
            os.close(fd)

    @dual
    async def mkdir(self, path: str, *, user: str = "user") -> None:
        """Makes a folder and its missing parents. Raises SandboxFileError when it exists."""
        await self._path_request(wire.MKDIR, path, user, second=0o755)

    @dual
    async def remove(self, path: str, *, recursive: bool = False, user: str = "user") -> None:
        """Removes a file or an empty folder; with `recursive`, a folder and everything in it."""
        await self._path_request(wire.REMOVE, path, user, flags=wire.REMOVE_TREE if recursive else 0)

    async def _path_request(self, op: int, path: str, user: str, *, flags: int = 0, first: int = 0, second: int = 0) -> int:
        reply, fd = await self._live().ask(
            op, absolute(path, self.spec.workdir) + b"\0", flags=flags, who=self._commands.who(user), first=first, second=second
        )
        if reply.status:
            raise file_error(reply.status, path)
        return fd

    async def _open(self, path: str, flags: int, user: str) -> int:
        """A descriptor of a regular file, or of a folder when asked for."""
        parents = wire.OPEN_PARENTS if flags & os.O_CREAT else 0
        fd = await self._path_request(wire.OPEN, path, user, flags=parents, first=flags, second=0o644)
        if fd < 0:
            raise SandboxFileError(errno.EIO, "the sandbox handed back no descriptor", path)
        kind = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(kind) if flags & os.O_DIRECTORY else stat.S_ISREG(kind)):
            os.close(fd)
            raise file_error(errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL, path)
        return fd

    async def _write(self, files: Mapping[str, bytes | str], user: str) -> None:
        await self.write_batch(place(files, self.spec.workdir), user)

    async def write_batch(self, payload: bytes, user: str) -> None:
        """Files, folders and links as one batch (wire.py). On the sandbox loop. Raises SandboxFileError naming the first that failed."""
        reply, _ = await self._live().ask(wire.WRITE, payload, who=self._commands.who(user))
        if reply.status:
            raise file_error(reply.status, reply.data.decode("utf-8", "replace"))
