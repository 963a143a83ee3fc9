"""Many layers as one. In: sealed layers of the store. Out: a layer that hides and shows what they did together.

A sandbox that is stopped and started again and again gains a layer each time; an overlay takes only so many. Files are not copied but
get another name: sealed layers never change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import Final

import msgspec

from sandmill.sandboxes.images.image import Image
from sandmill.sandboxes.images.layers import OPAQUE, is_opaque, walk_bytes
from sandmill.sandboxes.images.store import LayerRecord, Store

MOST_UNMERGED: Final = 48
_AT_ONCE: Final = 32


def merged(image: Image, store: Store) -> Image:
    """The image with its upper layers as one when it has many, that one pinned once; else the image itself. Its layers are pinned."""
    if len(image.layers) <= MOST_UNMERGED:
        return image
    parts = image.layers[-_AT_ONCE:]
    digest = "sha256:" + hashlib.sha256("\n".join(("sandmill merge 1", *parts)).encode()).hexdigest()
    if store.record(digest) is not None:
        store.pin(digest)
    else:
        with store.draft() as draft:
            for layer in parts:
                lay(store.layer_folder(layer), draft)
            store.keep(draft, LayerRecord(digest=digest, bytes=sum(walk_bytes(draft))))
    return msgspec.structs.replace(image, layers=(*image.layers[:-_AT_ONCE], digest))


def lay(upper: Path, target: Path) -> None:
    """Everything of `upper` on top of what is in `target`, and its attributes."""
    with os.scandir(upper) as entries:
        found = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    for entry in found:
        place = target / entry.name
        if entry.is_dir(follow_symlinks=False):
            _lay_folder(Path(entry.path), place)
            continue
        _clear(place)
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(info.st_mode):
            os.mknod(place, stat.S_IFCHR, os.makedev(0, 0))
        else:
            os.link(entry.path, place, follow_symlinks=False)
    info = upper.lstat()
    if os.geteuid() == 0:
        os.chown(target, info.st_uid, info.st_gid)
    os.chmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))


def _lay_folder(upper: Path, place: Path) -> None:
    kind = stat.S_IFMT(place.lstat().st_mode) if os.path.lexists(place) else None
    hides = is_opaque(upper) or kind not in (None, stat.S_IFDIR) or (kind == stat.S_IFDIR and is_opaque(place))
    if kind is not None and (kind != stat.S_IFDIR or is_opaque(upper)):
        _clear(place)
    place.mkdir(mode=0o700, exist_ok=True)
    if hides:
        os.setxattr(place, OPAQUE, b"y")
    lay(upper, place)


def _clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif os.path.lexists(place):
        place.unlink()
