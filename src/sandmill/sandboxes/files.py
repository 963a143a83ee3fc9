"""Paths and files of a sandbox, as values. In: what a caller names. Out: bytes for the agent, and what a folder holds."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Mapping

import msgspec

from sandmill.errors import ConfigError, SandboxFileError
from sandmill.sandboxes.backends.native import wire


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a folder. `name` may hold surrogates where the sandbox wrote bytes that are no UTF-8."""

    name: str
    kind: str
    """`file`, `folder`, `link` or `other`."""
    size_bytes: int
    mode: int = 0o644
    """Permissions."""


def absolute(path: str, workdir: str) -> bytes:
    """The path as the sandbox sees it. Links are the sandbox's business: they are followed inside it, by its own user."""
    name = wire.encode(posixpath.join(workdir, path))
    if b"\0" in name:
        raise SandboxFileError(errno.EINVAL, "a path may not contain NUL", path)
    return name


def contents(data: bytes | str, path: str) -> bytes:
    """What a file is to hold. Raises ConfigError for what is neither bytes nor text."""
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise ConfigError(f"the contents of {path!r:.200} must be bytes or text, not {type(data).__name__}", field="files")
    return wire.encode(data) if isinstance(data, str) else bytes(data)


def place(files: Mapping[str, bytes | str], workdir: str) -> bytes:
    """Files by path relative to `workdir`, as a batch. Raises SandboxFileError for a path no file can have, ConfigError."""
    try:
        return wire.batch({posixpath.join(workdir, path): contents(data, path) for path, data in files.items()})
    except OSError as error:
        raise SandboxFileError(error.errno, error.strerror, error.filename) from None


def open_flags(mode: str) -> tuple[int, bool]:
    """open(2) flags of a Python file mode, and whether it is binary. Raises ValueError."""
    kinds = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}
    letters = sorted(mode)
    kind = [letter for letter in letters if letter in kinds]
    if len(kind) != 1 or len(set(letters)) != len(letters) or set(letters) - set("rwaxbt+") or {"b", "t"} <= set(letters):
        raise ValueError(f"no such file mode: {mode!r}")
    access = os.O_RDWR if "+" in letters else os.O_RDONLY if kind == ["r"] else os.O_WRONLY
    return access | kinds[kind[0]], "b" in letters


def entry_of(entry: os.DirEntry[str]) -> FileEntry:
    """One entry, as it is itself: links are not followed."""
    info = entry.stat(follow_symlinks=False)
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    kind = next((kind for test, kind in kinds if test(info.st_mode)), "other")
    return FileEntry(name=entry.name, kind=kind, size_bytes=info.st_size, mode=info.st_mode & 0o777)


def file_error(number: int, path: str) -> SandboxFileError:
    """The error for a path that could not be used."""
    return SandboxFileError(number, f"in the sandbox: {os.strerror(number)}", path)
