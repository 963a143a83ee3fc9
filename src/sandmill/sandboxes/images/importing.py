"""From what a person names to an image in the store. In: a name, a digest, `oci:PATH[:TAG]` or `docker-archive:PATH[:NAME]`. Out: the
image, its layers unpacked once and pinned.
"""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import ConfigError, ImageError
from sandmill.sandboxes.images.image import HOST, MOST_LAYERS, Account, Image
from sandmill.sandboxes.images.layers import Attributes, Budget, LayerWriter, walk_bytes
from sandmill.sandboxes.images.oci import Found, Packed, Source, open_source, read_layout, read_saved
from sandmill.sandboxes.images.store import LayerRecord, Store, Use
from sandmill.sandboxes.images.unpack import unpack
from sandmill.sandboxes.spec import check_env

KINDS: Final = ("oci", "docker-archive")
_FLOOR: Final = "sha256:" + "f100" * 16
"""Not a digest of anything: the layer that every foreign image lies above, the same for all."""
_FLOOR_FOLDERS: Final = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "etc": 0o755, "root": 0o700, "tmp": 0o1777, "run": 0o755, "var": 0o755}
_FLOOR_FILES: Final = {
    "etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": b"sandbox\n",
    "etc/resolv.conf": b"",
    "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": b"root:x:0:\n",
}
_IDS: Final = 65536
_LARGEST_PASSWD: Final = 1 << 20
_LONGEST_WORKDIR: Final = 1024


def is_archive(wanted: str) -> bool:
    """Whether it names an archive rather than an image in the store."""
    return wanted.split(":", 1)[0] in KINDS and ":" in wanted


def obtain(wanted: str, store: Store, *, budget: Budget | None = None) -> tuple[Image, Use]:
    """The image that `wanted` means, imported if it is an archive. Its layers stay until the use is released. Raises ImageError."""
    if not is_archive(wanted):
        image = HOST if wanted == "host" else store.find(wanted)
        return image, store.use(image)
    kind, _, place = wanted.partition(":")
    path, tag = _split(place)
    source = open_source(path)
    try:
        found = read_saved(source, tag) if kind == "docker-archive" or not source.has("index.json") else read_layout(source, tag)
        return _import(found, store, budget or Budget(max_bytes=store.limit_bytes))
    finally:
        source.close()


def _split(place: str) -> tuple[Path, str | None]:
    """A path and the tag after it. A path may have colons of its own."""
    if os.path.exists(place):
        return Path(place), None
    for at, letter in enumerate(place):
        if letter == ":" and at and os.path.exists(place[:at]):
            return Path(place[:at]), place[at + 1 :]
    raise ImageError(f"no such image folder or archive: {place[:300]!r}")


def _import(found: Found, store: Store, budget: Budget) -> tuple[Image, Use]:
    pinned: list[str] = []
    try:
        _floor(store)
        pinned.append(_FLOOR)
        layers = [_FLOOR]
        for packed in found.layers:
            record = _layer(packed, store, budget)
            pinned.append(record.digest)
            layers = [_FLOOR] if record.opaque else [layer for layer in layers if layer != record.digest]
            layers.append(record.digest)
        image = Image(layers=tuple(layers), on_host=False, architecture=found.architecture)
        image = msgspec.structs.replace(image, env=_env(found), workdir=_workdir(found), account=account(found.user, image, store))
        if len(layers) > MOST_LAYERS:
            raise ImageError(f"the image has {len(layers)} layers and may have {MOST_LAYERS}; flatten it first")
        store.save(image)
        return image, store.use(image)
    finally:
        for layer in pinned:
            store.unpin(layer)


def _layer(packed: Packed, store: Store, budget: Budget) -> LayerRecord:
    """One layer, unpacked unless it was before; pinned."""
    known = store.record(packed.diff_id)
    if known is not None:
        store.pin(packed.diff_id)
        return known
    with store.draft() as draft, packed.open() as stream:
        writer = LayerWriter(draft, budget)
        try:
            unpack(stream, writer, digest=packed.digest, diff_id=packed.diff_id, max_bytes=budget.max_bytes)
        except OSError as error:
            raise ImageError(f"a layer could not be unpacked into the image store: {error.strerror or error}") from error
        record = LayerRecord(digest=packed.diff_id, bytes=sum(walk_bytes(draft)), opaque=writer.opaque_root)
        store.keep(draft, record)
    return record


def _floor(store: Store) -> None:
    """What every root needs and a foreign image may lack; whatever the image has of it wins."""
    if store.record(_FLOOR) is not None:
        store.pin(_FLOOR)
        return
    with store.draft() as draft:
        writer = LayerWriter(draft, Budget(max_bytes=1 << 20))
        for name, mode in _FLOOR_FOLDERS.items():
            writer.folder(name, Attributes(mode))
        for name, data in _FLOOR_FILES.items():
            writer.file(name, Attributes(0o644), len(data), lambda size, data=data: data)  # type: ignore[misc]
        writer.finish()
        store.keep(draft, LayerRecord(digest=_FLOOR, bytes=sum(walk_bytes(draft))))


def _env(found: Found) -> dict[str, str]:
    variables = {}
    for text in found.env:
        name, equals, value = text.partition("=")
        try:
            check_env(name, value)
        except ConfigError:
            continue
        if equals:
            variables[name] = value
    return variables


def _workdir(found: Found) -> str:
    """Absolute and plain; empty when the image names none that a sandbox can have."""
    path = posixpath.normpath("/" + found.workdir.lstrip("/"))
    if path == "/" or "\0" in path or len(path) > _LONGEST_WORKDIR or path.split("/")[1] in ("proc", "sys", "dev"):
        return ""
    return path


def account(user: str, image: Image, store: Store) -> Account:
    """Who a configuration's `User`, `NAME[:GROUP]`, is. Raises ImageError for a name that the image does not know."""
    name, _, group = user.partition(":")
    who = _user(name.strip(), image, store)
    return who if not group else msgspec.structs.replace(who, gid=_group(group.strip(), image, store))


def _user(name: str, image: Image, store: Store) -> Account:
    if image.on_host and name in ("user", "1000"):
        return Account()
    known = _accounts(image, store)
    if name in ("", "0", "root"):
        return known.get("root", Account(name="root", uid=0, gid=0, home="/root"))
    if name in known:
        return known[name]
    if name.isascii() and name.isdecimal() and int(name) < _IDS:
        return next((one for one in known.values() if one.uid == int(name)), Account(name=name, uid=int(name), gid=0, home="/"))
    raise ImageError(f"the image has no user {name[:80]!r} in its /etc/passwd; name one that it has, or a number below {_IDS}")


def _group(name: str, image: Image, store: Store) -> int:
    for fields in _table("group", image, store):
        if fields[0] == name and len(fields) >= 3 and _is_id(fields[2]):
            return int(fields[2])
    if _is_id(name):
        return int(name)
    raise ImageError(f"the image has no group {name[:80]!r} in its /etc/group; name one that it has, or a number below {_IDS}")


def _accounts(image: Image, store: Store) -> dict[str, Account]:
    return {
        fields[0]: Account(name=fields[0], uid=int(fields[2]), gid=int(fields[3]), home=fields[5])
        for fields in reversed(_table("passwd", image, store))
        if len(fields) >= 6 and _is_id(fields[2]) and _is_id(fields[3]) and fields[5].startswith("/")
    }


def _table(name: str, image: Image, store: Store) -> list[list[str]]:
    """Lines of the topmost /etc/<name>, in fields. Without one in any layer, that of this machine's base has no more than the defaults."""
    for layer in reversed(image.layers):
        data = _file(store.layer_folder(layer), ("etc", name))
        if data is not None:
            return [line.split(":") for line in data.decode("utf-8", "replace").split("\n")]
    return []


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < _IDS


def _file(folder: Path, parts: tuple[str, str]) -> bytes | None:
    """A small file of a layer, no link followed; None when this layer has none."""
    try:
        above = os.open(folder / parts[0], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            descriptor = os.open(parts[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
        finally:
            os.close(above)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_LARGEST_PASSWD) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


__all__ = ["Source", "account", "is_archive", "obtain"]
