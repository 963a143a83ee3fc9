"""Writing one layer's folder. In: entries of a hostile archive, in its order. Out: a tree that an overlay can have below it.

No entry reaches outside the folder: parents are looked up name by name, links among them are followed within the folder, and `..` is
refused in names and stops at the top in links. Nobody else writes there meanwhile, so a look and the act after it agree. Setuid and
setgid are dropped, devices are never made; what an entry says it removes becomes an overlay's whiteout.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from sandmill.errors import ImageError

OPAQUE: Final = "user.overlay.opaque"
WHITEOUT: Final = ".wh."
OPAQUE_MARK: Final = ".wh..wh..opq"
ENTRY_BYTES: Final = 512
"""What an entry costs besides its contents, in the account of sizes."""
_DEEPEST: Final = 200
_LONGEST_PATH: Final = 3500
_LONGEST_NAME: Final = 255
_MOST_HOPS: Final = 40
_IDS: Final = 65536
_NOBODY: Final = 65534
_CHUNK: Final = 1 << 20


class Budget:
    """How much an import may still unpack, over all its layers."""

    def __init__(self, *, max_bytes: int, max_entries: int = 2_000_000) -> None:
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self.bytes = self.entries = 0

    def spend(self, size: int) -> None:
        """Raises ImageError when it is used up."""
        self.bytes += size
        if self.bytes > self.max_bytes:
            raise ImageError(f"the image unpacks to more than {self.max_bytes} bytes; if you trust it, raise SANDMILL_IMAGES_BYTES")

    def enter(self) -> None:
        """One more entry."""
        self.entries += 1
        if self.entries > self.max_entries:
            raise ImageError(f"the image has more than {self.max_entries} entries, the most that one may have")
        self.spend(ENTRY_BYTES)


class Attributes:
    """Owner, permissions and time of one entry, as far as a layer keeps them."""

    __slots__ = ("gid", "mode", "mtime_ns", "uid")

    def __init__(self, mode: int, uid: int = 0, gid: int = 0, mtime_ns: int = 0) -> None:
        self.mode = mode & 0o1777
        self.uid = uid if 0 <= uid < _IDS else _NOBODY
        self.gid = gid if 0 <= gid < _IDS else _NOBODY
        self.mtime_ns = min(max(mtime_ns, 0), 2**63 - 1)


class LayerWriter:
    """One layer being written into an empty folder."""

    def __init__(self, root: Path, budget: Budget) -> None:
        self._root = os.fspath(root)
        self._budget = budget
        self._owns = os.geteuid() == 0
        self._parents: dict[str, str] = {}
        self._folders: dict[str, Attributes] = {}
        self.opaque_root = False

    def folder(self, name: str, attributes: Attributes) -> None:
        """A folder, or new attributes of one that is there."""
        place = self._place(name)
        if place == self._root:
            self._folders[place] = attributes
            return
        kind = _kind(place)
        if kind != stat.S_IFDIR:
            hidden = kind == stat.S_IFCHR
            self._clear(place)
            os.mkdir(place, 0o700)
            if hidden:
                _mark_opaque(place)
        self._own(place, attributes)
        self._folders[place] = attributes

    def file(self, name: str, attributes: Attributes, size: int, read: Callable[[int], bytes]) -> None:
        """A regular file with `size` bytes from `read`."""
        place = self._place(name, fresh=True)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = size
            while left:
                data = read(min(left, _CHUNK))
                if not data:
                    raise ImageError(f"the archive ends in the middle of {name!r}; fetch it again")
                self._budget.spend(len(data))
                left -= len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            if self._owns:
                os.fchown(descriptor, attributes.uid, attributes.gid)
            os.fchmod(descriptor, attributes.mode)
            os.utime(descriptor, ns=(attributes.mtime_ns, attributes.mtime_ns))
        finally:
            os.close(descriptor)

    def symlink(self, name: str, target: str, attributes: Attributes) -> None:
        """A symbolic link; its target is only text."""
        if not target or "\0" in target or len(os.fsencode(target)) >= 4096:
            raise ImageError(f"the target of link {name!r} is none that a link can have; the archive is damaged or hostile")
        place = self._place(name, fresh=True)
        os.symlink(target, place)
        self._own(place, attributes)
        os.utime(place, ns=(attributes.mtime_ns, attributes.mtime_ns), follow_symlinks=False)

    def hard_link(self, name: str, target: str) -> None:
        """Another name of a file of the same layer."""
        source = self._place(target)
        if _kind(source) not in (stat.S_IFREG, stat.S_IFLNK):
            raise ImageError(f"hard link {name!r} leads to {target!r}, which is no file of its layer; the archive is damaged or hostile")
        place = self._place(name)
        if place == source:
            return
        place = self._place(name, fresh=True)
        if _kind(source) not in (stat.S_IFREG, stat.S_IFLNK):
            raise ImageError(f"hard link {name!r} replaces its own target {target!r}; the archive is damaged or hostile")
        os.link(source, place, follow_symlinks=False)

    def fifo(self, name: str, attributes: Attributes) -> None:
        """A named pipe."""
        place = self._place(name, fresh=True)
        os.mkfifo(place, 0o600)
        self._own(place, attributes)
        os.chmod(place, attributes.mode)

    def whiteout(self, name: str) -> None:
        """`name` of the layers below is gone. What this layer itself has there stays."""
        place = self._place(name)
        kind = _kind(place)
        if kind is None:
            os.mknod(place, stat.S_IFCHR, os.makedev(0, 0))
        elif kind == stat.S_IFDIR and place != self._root:
            _mark_opaque(place)

    def opaque(self, name: str) -> None:
        """Nothing of the layers below is seen in this folder."""
        place = self._descend(_parts(name))
        if place == self._root:
            self.opaque_root = True
        else:
            _mark_opaque(place)

    def finish(self) -> None:
        """Folders get their permissions and times last: entries below them would change both."""
        self._folders.setdefault(self._root, Attributes(0o755))
        for place, attributes in sorted(self._folders.items(), reverse=True):
            if _kind(place) == stat.S_IFDIR:
                self._own(place, attributes)
                os.chmod(place, attributes.mode)
                os.utime(place, ns=(attributes.mtime_ns, attributes.mtime_ns))

    def _place(self, name: str, *, fresh: bool = False) -> str:
        """Where `name` lies, its parents made. `fresh`: with nothing there."""
        self._budget.enter()
        parts = _parts(name)
        if not parts:
            if fresh:
                raise ImageError("the top of a layer can only be a folder; the archive is damaged or hostile")
            return self._root
        place = f"{self._descend(parts[:-1])}/{parts[-1]}"
        if len(os.fsencode(place)) - len(os.fsencode(self._root)) > _LONGEST_PATH:
            raise ImageError(f"a path of the image is longer than {_LONGEST_PATH} bytes: {name[:80]!r}...")
        if fresh:
            self._clear(place)
        return place

    def _descend(self, parts: list[str]) -> str:
        """The folder that `parts` name, made where it is missing, links followed within this layer."""
        key = "/".join(parts)
        known = self._parents.get(key)
        if known is not None:
            return known
        here: list[str] = []
        left, hops = list(reversed(parts)), 0
        while left:
            part = left.pop()
            if part == "..":
                here = here[:-1]
                continue
            place = "/".join((self._root, *here, part))
            kind = _kind(place)
            if kind == stat.S_IFLNK:
                hops += 1
                if hops > _MOST_HOPS:
                    raise ImageError(f"the links on the way to {key!r} go round in circles; the archive is damaged or hostile")
                target = os.readlink(place)
                here = [] if target.startswith("/") else here
                left.extend(part for part in reversed(target.split("/")) if part not in ("", "."))
                continue
            if kind in (None, stat.S_IFCHR):
                self._make_parent(place, was_hidden=kind is not None)
            elif kind != stat.S_IFDIR:
                raise ImageError(f"{key!r} lies below a file; the archive is damaged or hostile")
            here.append(part)
        if len(here) > _DEEPEST:
            raise ImageError(f"folders of the image are nested more than {_DEEPEST} deep: {key[:80]!r}...")
        if len(self._parents) > 10_000:
            self._parents.clear()
        self._parents[key] = found = "/".join((self._root, *here))
        return found

    def _make_parent(self, place: str, *, was_hidden: bool) -> None:
        self._budget.enter()
        if was_hidden:
            os.unlink(place)
        os.mkdir(place, 0o755)
        if was_hidden:
            _mark_opaque(place)

    def _clear(self, place: str) -> None:
        kind = _kind(place)
        if kind is None:
            return
        if kind in (stat.S_IFDIR, stat.S_IFLNK):
            self._parents.clear()
        if kind == stat.S_IFDIR:
            shutil.rmtree(place)
        else:
            os.unlink(place)

    def _own(self, place: str, attributes: Attributes) -> None:
        if self._owns:
            os.chown(place, attributes.uid, attributes.gid, follow_symlinks=False)


def _parts(name: str) -> list[str]:
    """A name's parts. A leading slash means the top of the image."""
    if "\0" in name:
        raise ImageError(f"a name in the archive has NUL in it: {name[:80]!r}")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ImageError(f"{name[:200]!r} climbs out of its folder with '..'; the archive is hostile")
    if len(parts) > _DEEPEST:
        raise ImageError(f"folders of the image are nested more than {_DEEPEST} deep: {name[:80]!r}...")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        raise ImageError(f"a name of the image is longer than {_LONGEST_NAME} bytes: {name[:80]!r}...")
    return parts


def _kind(place: str) -> int | None:
    try:
        return stat.S_IFMT(os.lstat(place).st_mode)
    except FileNotFoundError:
        return None


def _mark_opaque(place: str) -> None:
    os.setxattr(place, OPAQUE, b"y")


def is_opaque(folder: Path | int) -> bool:
    """Whether nothing of the layers below is seen in it."""
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:
        return False


def walk_bytes(root: Path) -> Iterator[int]:
    """Sizes of a layer's files, for its account."""
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            info = os.lstat(os.path.join(folder, name))
            yield ENTRY_BYTES + (info.st_blocks * 512 if stat.S_ISREG(info.st_mode) else 0)
