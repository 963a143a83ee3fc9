"""What a sandbox wrote, as a layer. In: a descriptor of the folder that its overlay writes to. Out: a sealed copy, named by its contents.

The folder is hostile and may change while it is read, unless the sandbox is frozen: no link is followed, every folder and file is opened
below one that is open already, nothing but regular files is read, and holes stay holes. Ids become those inside the sandbox.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from typing import Final

from sandmill.errors import ImageError
from sandmill.sandboxes.backends.native.node import UID_BASE
from sandmill.sandboxes.images.image import Image
from sandmill.sandboxes.images.layers import ENTRY_BYTES, OPAQUE, is_opaque
from sandmill.sandboxes.images.store import LayerRecord, Store

BEGINNING: Final = b"sandmill layer 1\0"
_DEEPEST: Final = 200
_CHUNK: Final = 1 << 20
_IDS: Final = 65536
_NOBODY: Final = 65534
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def seal(written: int, image: Image, store: Store) -> Image:
    """`image` with what was written on top of it; its new layer is pinned once, for the caller to unpin. Raises ImageError."""
    with store.draft() as draft:
        target = os.open(draft, _FOLDER)
        try:
            copy = _Copy(target)
            copy.folder(written, target, 0)
        except OSError as error:
            raise ImageError(f"the sandbox's files could not be copied into the image store: {error.strerror}") from error
        finally:
            os.close(target)
        sealed = image.above(f"sha256:{copy.hash.hexdigest()}")
        store.keep(draft, LayerRecord(digest=sealed.layers[-1], bytes=copy.bytes))
        return sealed


def digest(written: int) -> str:
    """What `seal` would call the layer, without writing one. Raises ImageError."""
    look = _Copy(-1)
    try:
        look.folder(written, -1, 0)
    except OSError as error:
        raise ImageError(f"the sandbox's files could not be read: {error.strerror}") from error
    return f"sha256:{look.hash.hexdigest()}"


def recite(layer: int, say: Callable[[bytes], object]) -> None:
    """Says all that is in a layer of the store: the words that, after BEGINNING, `seal` hashes to name one. parcels.py understands them.

    Raises ImageError, OSError.
    """
    _Copy(-1, say, first_id=0).folder(layer, -1, 0)


class _Copy:
    """One copying of a tree: its running digest and size, where it is, and where files with several names were put first.

    A target of -1 everywhere means that the tree is only read. `say` is told what would be hashed; `first_id`: the id of the tree's 0.
    """

    def __init__(self, target: int, say: Callable[[bytes], object] | None = None, *, first_id: int = UID_BASE) -> None:
        self.hash = hashlib.sha256(BEGINNING)
        self.bytes = 0
        self._say = say or self.hash.update
        self._first_id = first_id
        self._target = target
        self._above: list[str] = []
        self._links: dict[int, str] = {}
        """Inode to the path of its copy, for those with more than one name."""

    def folder(self, source: int, target: int, depth: int) -> None:
        """Everything in the folder `source`, then its attributes."""
        self._entries(source, target, depth)
        info = os.fstat(source)
        opaque = is_opaque(source)
        self._note("folder", "", info, b"y" if opaque else b"")
        if opaque and target >= 0:
            os.setxattr(target, OPAQUE, b"y")
        _own(target, info, self._first_id)

    def _entries(self, source: int, target: int, depth: int) -> None:
        if depth > _DEEPEST:
            raise ImageError(f"the sandbox has folders nested more than {_DEEPEST} deep, which an image cannot have; remove them first")
        for name in sorted(os.listdir(source), key=os.fsencode):
            info = os.stat(name, dir_fd=source, follow_symlinks=False)
            self.bytes += ENTRY_BYTES
            kind = stat.S_IFMT(info.st_mode)
            if kind == stat.S_IFDIR:
                self._below(source, target, name, depth)
            elif kind == stat.S_IFREG:
                self._file(source, target, name)
            elif kind == stat.S_IFLNK:
                self._link(source, target, name, info)
            elif kind == stat.S_IFIFO:
                self._fifo(target, name, info)
            elif kind == stat.S_IFCHR and info.st_rdev == 0:
                if target >= 0:
                    os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=target)
                self._say(b"whiteout " + os.fsencode(name) + b"\0")

    def _below(self, source: int, target: int, name: str, depth: int) -> None:
        with contextlib.ExitStack() as stack:
            inner = os.open(name, _FOLDER, dir_fd=source)
            stack.callback(os.close, inner)
            copy = -1
            if target >= 0:
                os.mkdir(name, 0o700, dir_fd=target)
                copy = os.open(name, _FOLDER, dir_fd=target)
                stack.callback(os.close, copy)
            self._say(b"enter " + os.fsencode(name) + b"\0")
            self._above.append(name)
            self.folder(inner, copy, depth + 1)
            self._above.pop()

    def _fifo(self, target: int, name: str, info: os.stat_result) -> None:
        self._note("fifo", name, info, b"")
        if target >= 0:
            os.mkfifo(name, 0o600, dir_fd=target)
            _own_name(target, name, info, self._first_id)
            os.chmod(name, info.st_mode & 0o777, dir_fd=target)

    def _link(self, source: int, target: int, name: str, info: os.stat_result) -> None:
        text = os.readlink(name, dir_fd=source)
        self._note("link", name, info, os.fsencode(text))
        if target >= 0:
            os.symlink(text, name, dir_fd=target)
            _own_name(target, name, info, self._first_id)

    def _file(self, source: int, target: int, name: str) -> None:
        with contextlib.ExitStack() as stack:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
            stack.callback(os.close, file)
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                raise ImageError("the sandbox's files changed while they were copied; freeze it first")
            if info.st_nlink > 1 and self._again(info, target, name):
                return
            copy = -1
            if target >= 0:
                copy = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target)
                stack.callback(os.close, copy)
            self._note("file", name, info, str(info.st_size).encode())
            self._contents(file, copy, info.st_size)
            _own(copy, info, self._first_id)

    def _again(self, info: os.stat_result, target: int, name: str) -> bool:
        """Whether the file was copied under another name, which then gets this one too."""
        own = "/".join((*self._above, name))
        first = self._links.setdefault(info.st_ino, own)
        if first is own:
            return False
        try:
            if target >= 0:
                os.link(first, name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
        except OSError:  # its first name is too long for a path, or it has all the links that a file can have
            return False
        self._note("again", name, info, os.fsencode(first))
        return True

    def _contents(self, file: int, copy: int, size: int) -> None:
        """The parts that hold data: a file may claim terabytes and hold nothing."""
        end = 0
        while end < size:
            try:
                start = os.lseek(file, end, os.SEEK_DATA)
            except OSError:
                break
            end = min(os.lseek(file, start, os.SEEK_HOLE), size)
            self._say(f"{start}-{end}\0".encode())
            self._part(file, copy, start, end)
        if copy >= 0:
            os.ftruncate(copy, size)

    def _part(self, file: int, copy: int, at: int, end: int) -> None:
        while at < end:
            data = os.pread(file, min(_CHUNK, end - at), at)
            if not data:
                return
            self._say(data)
            self.bytes += len(data)
            if copy < 0:
                at += len(data)
                continue
            view = memoryview(data)
            while view:
                done = os.pwrite(copy, view, at)
                at, view = at + done, view[done:]

    def _note(self, kind: str, name: str, info: os.stat_result, more: bytes) -> None:
        uid, gid = _ids(info, self._first_id)
        text = f"{kind} {info.st_mode & 0o1777:o} {uid} {gid} {info.st_mtime_ns}\0"
        self._say(text.encode() + os.fsencode(name) + b"\0" + more + b"\0")


def _ids(info: os.stat_result, first: int) -> tuple[int, int]:
    if os.geteuid():
        return 0, 0
    uid, gid = info.st_uid - first, info.st_gid - first
    return uid if 0 <= uid < _IDS else _NOBODY, gid if 0 <= gid < _IDS else _NOBODY


def _own(target: int, info: os.stat_result, first: int) -> None:
    """Owner, permissions without setuid and setgid, and time."""
    if target < 0:
        return
    if os.geteuid() == 0:
        os.fchown(target, *_ids(info, first))
    os.fchmod(target, info.st_mode & 0o1777)
    os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))


def _own_name(target: int, name: str, info: os.stat_result, first: int) -> None:
    if os.geteuid() == 0:
        os.chown(name, *_ids(info, first), dir_fd=target, follow_symlinks=False)
    os.utime(name, ns=(info.st_mtime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)
