"""Parts of what a sandbox wrote. In: its sealed files, the image it began as, and paths. Out: that image with only what was written
below those paths, and the names of what else was written.

A sealed layer never changes, and its files get further names instead of copies. Its links are the sandbox's own words: none is followed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sandmill.sandboxes.images.image import Image
from sandmill.sandboxes.images.layers import OPAQUE, is_opaque, walk_bytes
from sandmill.sandboxes.images.merging import lay
from sandmill.sandboxes.images.store import LayerRecord, Store, Use

MOST_NAMES: Final = 200
"""Of what was left behind, the first so many are named."""


class Parts(NamedTuple):
    """`image` holds what was taken; `use` keeps its layers, which go with it. `left`: absolute paths written elsewhere, folders before
    what is in them, at most MOST_NAMES."""

    image: Image
    use: Use
    left: tuple[str, ...]


def take(sealed: Image, base: Image, paths: Sequence[str], never: Sequence[str], store: Store, top: str | None = None) -> Parts:
    """`base` and, of what `sealed` has on top of it, all below `paths` but nothing of `never`. Both are absolute and plain.

    The path `/` stands for every name at the top that no path of `never` begins with. A path that the sandbox made a link or a device is
    taken as removed. `top`: a layer to lay above it all. Blocking. Raises ImageError, OSError.
    """
    image, pinned, left = base, list[str](), list[str]()
    try:
        for layer in _written(sealed, base):
            folder = store.layer_folder(layer)
            digest = _digest(layer, base, paths, never)
            wanted = _outermost([parts for path in paths for parts in _expanded(path, never, folder)])
            if store.record(digest) is not None:
                store.pin(digest)
            else:
                with store.draft() as draft:
                    part = _Part(folder, draft, [store.layer_folder(one) for one in reversed(base.layers)])
                    for parts in wanted:
                        part.take(parts)
                    store.keep(draft, LayerRecord(digest=digest, bytes=sum(walk_bytes(draft))))
            pinned.append(digest)
            image = image.above(digest)
            left += _left(folder, wanted, MOST_NAMES - len(left))
        image = image if top is None else image.above(top)
        return Parts(image, store.use(image, fleeting=True), tuple(left))
    finally:
        for digest in pinned:
            store.unpin(digest)


def _written(sealed: Image, base: Image) -> tuple[str, ...]:
    """The layers that are not the base's. One that was among the base's and moved to the top counts as written; where layers were merged,
    everything from the first difference on does."""
    if sealed.layers and sealed.layers[:-1] == tuple(layer for layer in base.layers if layer != sealed.layers[-1]):
        return sealed.layers[-1:]
    same = 0
    while same < len(base.layers) and base.layers[same] == sealed.layers[same]:
        same += 1
    return sealed.layers[same:]


def _digest(layer: str, base: Image, paths: Sequence[str], never: Sequence[str]) -> str:
    text = "\0".join(("sandmill part 1", layer, base.digest, "paths", *paths, "never", *never))
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _expanded(path: str, never: Sequence[str], folder: Path) -> Iterator[tuple[str, ...]]:
    parts = tuple(part for part in path.split("/") if part)
    if parts:
        yield parts
        return
    barred = {one.split("/")[1] for one in never}
    yield from ((name,) for name in sorted(os.listdir(folder)) if name not in barred)


def _outermost(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without repetitions and those that lie below another."""
    every = set(paths)
    return sorted(path for path in every if not any(path[:depth] in every for depth in range(1, len(path))))


def _kind(place: Path) -> int | None:
    try:
        return stat.S_IFMT(place.lstat().st_mode)
    except FileNotFoundError:
        return None


class _Part:
    """One layer's parts, laid into an empty folder. `below`: the folders of the layers under it, the topmost first."""

    def __init__(self, layer: Path, target: Path, below: Sequence[Path]) -> None:
        self._layer = layer
        self._target = target
        self._below = below

    def take(self, parts: tuple[str, ...]) -> None:
        """What the layer says about one path and everything below it."""
        source, hidden = self._layer, False
        for part in parts[:-1]:
            source = source / part
            kind = _kind(source)
            if kind is None:
                break
            if kind != stat.S_IFDIR:
                hidden = True
                break
            hidden = hidden or is_opaque(source)
        else:
            self._last(source / parts[-1], parts, hidden=hidden)
            return
        if hidden:
            self._remove(parts)

    def _last(self, source: Path, parts: tuple[str, ...], *, hidden: bool) -> None:
        kind = _kind(source)
        if kind is None and not hidden:
            return
        if kind == stat.S_IFDIR:
            place = self._parent(parts) / parts[-1]
            place.mkdir(mode=0o700, exist_ok=True)
            if hidden or is_opaque(source):
                os.setxattr(place, OPAQUE, b"y")
            lay(source, place)
        elif kind == stat.S_IFREG:
            os.link(source, self._parent(parts) / parts[-1], follow_symlinks=False)
        else:
            self._remove(parts)

    def _remove(self, parts: tuple[str, ...]) -> None:
        place = self._parent(parts) / parts[-1]
        if _kind(place) is None:
            os.mknod(place, stat.S_IFCHR, os.makedev(0, 0))

    def _parent(self, parts: tuple[str, ...]) -> Path:
        """The folder above, its attributes and its parents' as the layers below have them: they are not the sandbox's to say."""
        place = self._target
        for depth, part in enumerate(parts[:-1], 1):
            place = place / part
            if _kind(place) is None:
                place.mkdir()
                self._attributes(place, parts[:depth])
        return place

    def _attributes(self, place: Path, parts: tuple[str, ...]) -> None:
        found = next((info for info in (_info(below, parts) for below in self._below) if info is not None), None)
        if found is not None and os.geteuid() == 0:
            os.chown(place, found.st_uid, found.st_gid)
        os.chmod(place, 0o755 if found is None else stat.S_IMODE(found.st_mode) & 0o1777)


def _info(layer: Path, parts: tuple[str, ...]) -> os.stat_result | None:
    """A folder's attributes in a layer, when no link leads to it."""
    place = layer
    info: os.stat_result | None = None
    for part in parts:
        place = place / part
        try:
            info = place.lstat()
        except OSError:
            return None
        if not stat.S_ISDIR(info.st_mode):
            return None
    return info


def _left(folder: Path, wanted: Sequence[tuple[str, ...]], most: int) -> list[str]:
    """Names of what lies in the layer and below none of the wanted paths."""
    found: list[str] = []

    def look(place: Path, parts: tuple[str, ...]) -> None:
        with os.scandir(place) as entries:
            names = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        for name, is_folder in names:
            own = (*parts, name)
            if len(found) >= most:
                return
            if own in taken:
                continue
            if own not in above:
                found.append("/" + "/".join(own))
            if is_folder:
                look(place / name, own)

    taken = set(wanted)
    above = {parts[:depth] for parts in wanted for depth in range(1, len(parts))}
    look(folder, ())
    return found
