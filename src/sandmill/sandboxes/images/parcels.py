"""Layers as bytes that travel between machines. In: a layer of the store; a parcel's bytes. Out: a parcel; the same layer in another store.

A parcel is what `written.py` says of the layer's folder, compressed: names, owners, times, holes and whiteouts are all in it, and a
layer that a sandbox wrote is named by the very hash of these words. Its digest is checked before a byte of it is understood. Whoever sent
it may be hostile nevertheless: every name is one step below a folder that is open already, a file's second name leads to a file of the
same parcel, nothing is written twice, and sizes and entries are bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import zstandard

from sandmill.errors import ImageError
from sandmill.sandboxes.images.layers import OPAQUE, Attributes, Budget
from sandmill.sandboxes.images.store import Store
from sandmill.sandboxes.images.written import BEGINNING, recite

_LEVEL: Final = 1
_LARGEST_WINDOW: Final = 1 << 27
_CHUNK: Final = 1 << 18
_LONGEST_WORD: Final = 1 << 13
_LONGEST_NAME: Final = 255
_DEEPEST: Final = 201
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, packed."""

    digest: str
    """Of the parcel's bytes; the layer's own name is another."""
    size: int


def pack(layer: str, store: Store, target: Path) -> Parcel:
    """Writes a layer's parcel to `target`. Blocks. Raises ImageError when the layer is not there, OSError."""
    store.pin(layer)
    try:
        folder = os.open(store.layer_folder(layer), _FOLDER)
        try:
            with os.fdopen(os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w+b") as file:
                with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as packed:
                    recite(folder, packed.write)
                file.flush()
                file.seek(0)
                return Parcel(digest=f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}", size=file.tell())
        finally:
            os.close(folder)
    finally:
        store.unpin(layer)


def unpack(parcel: Path, draft: Path, budget: Budget) -> str:
    """Writes what is in a parcel into an empty folder, and returns what `seal` would call it. Blocks. Raises ImageError, OSError."""
    top = os.open(draft, _FOLDER)
    try:
        with parcel.open("rb") as file:
            words = _Words(file)
            _Unpacking(words, top, budget).run()
            return words.end()
    except (FileExistsError, zstandard.ZstdError, ValueError, UnicodeError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"a layer that was sent here cannot be understood ({type(error).__name__}); it is damaged or hostile") from error
    finally:
        os.close(top)


class _Words:
    """Words that each end with a NUL, and bytes of known length between them."""

    def __init__(self, file: BinaryIO) -> None:
        self._source = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(file)
        self._hash = hashlib.sha256(BEGINNING)
        self._held = b""
        self._at = 0

    def word(self) -> bytes:
        """The next word."""
        while (end := self._held.find(b"\0", self._at)) < 0:
            if len(self._held) - self._at > _LONGEST_WORD or not self._more():
                raise _damaged()
        found = self._held[self._at : end]
        self._at = end + 1
        return found

    def digit(self) -> bool:
        """Whether the next word begins with a digit."""
        return (self._at < len(self._held) or self._more()) and self._held[self._at : self._at + 1].isdigit()

    def data(self, size: int) -> Iterator[bytes]:
        """The next bytes, piece by piece."""
        while size:
            if self._at == len(self._held) and not self._more():
                raise _damaged()
            piece = self._held[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            yield piece

    def end(self) -> str:
        """All were read; the digest of everything. Raises ImageError when there is more."""
        if self._at < len(self._held) or self._more():
            raise _damaged()
        return f"sha256:{self._hash.hexdigest()}"

    def _more(self) -> bool:
        data: bytes = self._source.read(_CHUNK)
        self._hash.update(data)
        self._held, self._at = self._held[self._at :] + data, 0
        return bool(data)


class _Unpacking:
    """One layer being written. `folders`: those that are open, from the top to where the words are."""

    def __init__(self, words: _Words, top: int, budget: Budget) -> None:
        self._words = words
        self._top = top
        self._budget = budget
        self._owns = os.geteuid() == 0
        self._folders = [top]
        self._path: list[bytes] = []
        self._files: set[bytes] = set()
        """Paths of regular files that this parcel has written: a second name may lead to one of them and nowhere else."""

    def run(self) -> None:
        """Until the top folder is whole. Raises ImageError, OSError, ValueError."""
        try:
            while self._folders:
                kind, _, rest = self._words.word().partition(b" ")
                if kind == b"enter":
                    self._enter(_name(rest))
                elif kind == b"whiteout":
                    self._budget.enter()
                    os.mknod(_name(rest), stat.S_IFCHR, os.makedev(0, 0), dir_fd=self._folders[-1])
                else:
                    self._entry(kind, _attributes(rest), self._words.word(), self._words.word())
        finally:
            for folder in self._folders[1:]:
                os.close(folder)

    def _enter(self, name: bytes) -> None:
        self._budget.enter()
        if len(self._folders) > _DEEPEST:
            raise _damaged()
        os.mkdir(name, 0o700, dir_fd=self._folders[-1])
        self._folders.append(os.open(name, _FOLDER, dir_fd=self._folders[-1]))
        self._path.append(name)

    def _entry(self, kind: bytes, attributes: Attributes, name: bytes, more: bytes) -> None:
        if kind == b"folder":
            self._leave(attributes, opaque=more == b"y")
            return
        self._budget.enter()
        name, where = _name(name), self._folders[-1]
        path = b"/".join((*self._path, name))
        if kind == b"file":
            self._file(name, int(more), attributes)
            self._files.add(path)
        elif kind == b"again" and more in self._files:
            os.link(more, name, src_dir_fd=self._top, dst_dir_fd=where, follow_symlinks=False)
            self._files.add(path)
        elif kind == b"link" and more:
            os.symlink(more, name, dir_fd=where)
            self._own_name(name, attributes)
        elif kind == b"fifo":
            os.mkfifo(name, 0o600, dir_fd=where)
            os.chmod(name, attributes.mode, dir_fd=where)
            self._own_name(name, attributes)
        else:
            raise _damaged()

    def _leave(self, attributes: Attributes, *, opaque: bool) -> None:
        """The folder has all its entries: its own attributes come last, since entries change them."""
        folder = self._folders.pop()
        try:
            if opaque:
                os.setxattr(folder, OPAQUE, b"y")
            self._own(folder, attributes)
        finally:
            if self._folders:
                self._path.pop()
                os.close(folder)

    def _file(self, name: bytes, size: int, attributes: Attributes) -> None:
        with contextlib.closing(os.fdopen(os.open(name, _FRESH, 0o600, dir_fd=self._folders[-1]), "wb", buffering=0)) as file:
            end = 0
            while self._words.digit():
                first, _, last = self._words.word().partition(b"-")
                start, before, end = int(first), end, int(last)
                if not before <= start < end <= size:
                    raise _damaged()
                file.seek(start)
                for piece in self._words.data(end - start):
                    self._budget.spend(len(piece))
                    view = memoryview(piece)
                    while view:
                        view = view[file.write(view) :]
            if size < 0:
                raise _damaged()
            file.truncate(size)
            self._own(file.fileno(), attributes)

    def _own(self, target: int, attributes: Attributes) -> None:
        if self._owns:
            os.fchown(target, attributes.uid, attributes.gid)
        os.fchmod(target, attributes.mode)
        os.utime(target, ns=(attributes.mtime_ns, attributes.mtime_ns))

    def _own_name(self, name: bytes, attributes: Attributes) -> None:
        if self._owns:
            os.chown(name, attributes.uid, attributes.gid, dir_fd=self._folders[-1], follow_symlinks=False)
        os.utime(name, ns=(attributes.mtime_ns, attributes.mtime_ns), dir_fd=self._folders[-1], follow_symlinks=False)


def _attributes(text: bytes) -> Attributes:
    """`MODE UID GID MTIME`. Raises ValueError."""
    mode, uid, gid, mtime_ns = text.split(b" ")
    return Attributes(int(mode, 8), int(uid), int(gid), int(mtime_ns))


def _name(name: bytes) -> bytes:
    if name in (b"", b".", b"..") or b"/" in name or len(name) > _LONGEST_NAME:
        raise _damaged()
    return name


def _damaged() -> ImageError:
    return ImageError("a layer that was sent here is not what a layer is; it is damaged or hostile, and nothing of it was kept")
