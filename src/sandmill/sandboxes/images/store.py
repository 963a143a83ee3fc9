"""The images of this machine, shared by all processes. In: layers and records. Out: the same, whole or not at all; never more than a bound.

    <state>/images/layers/<digest>/        a layer's folder, owned by ids from 0 on
                   layers/.new-*  .old-*   being written; being removed (with a .lock file beside it that its writer holds)
                   records/<digest>.json   one layer's size. It is there exactly while the layer may be used, and is held (flock) by
                                           every process whose sandboxes use it
                   images/<digest>.json    an image (image.py); its time of change is that of its last use
                   names/<name>            the digest that a name means
                   steps/<key>             the digest that a step of a build came to
                   lock                    held while any of these changes

The folder is closed to everyone but its owner: in-sandbox root can leave files there that would be setuid root outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import ImageError
from sandmill.sandboxes.backends.native import state
from sandmill.sandboxes.images.holding import LOCK_S, hold, is_free, lock, write
from sandmill.sandboxes.images.image import Image, folder_name

DEFAULT_LIMIT_BYTES: Final = 20 << 30
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,119}")
_DIGEST: Final = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """records/<digest>.json. `opaque`: nothing below this layer is seen."""

    digest: str
    bytes: int
    opaque: bool = False
    version: int = 1


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """An image as it is listed."""

    image: Image
    digest: str
    names: tuple[str, ...]
    bytes: int
    """With the layers that it shares."""
    used_at: float
    in_use: bool
    kept: bool


class Use:
    """Layers that cannot be removed until every holder has released them. It ends with the process, however that ends."""

    def __init__(self, store: Store, layers: tuple[str, ...], *, fleeting: bool = False) -> None:
        self._store = store
        self._layers = layers
        self._fleeting = fleeting
        self._holders = 1
        self._counting = threading.Lock()

    def share(self) -> Use:
        """For one more holder."""
        with self._counting:
            self._holders += 1
        return self

    def release(self) -> None:
        """The layers may go as far as this holder is concerned. `fleeting` ones go at once after the last."""
        with self._counting:
            self._holders -= 1
            if self._holders:
                return
        for layer in self._layers:
            self._store.unpin(layer)
        if self._fleeting:
            self._store.collect()


class Store:
    """One state folder's images. May be used from any thread."""

    def __init__(self, root: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._guard = threading.Lock()
        self._pins: dict[str, tuple[int, int]] = {}
        self._changing = threading.RLock()
        self._depth = 0
        self._lock = -1
        for name in ("layers", "records", "images", "names", "steps"):
            (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)

    def layer_folder(self, layer: str) -> Path:
        """Where a layer lies."""
        return self.root / "layers" / folder_name(layer)

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """An empty folder to write a layer into; removed at the end unless `keep` took it. A killed writer's is swept later."""
        name = f".new-{os.getpid()}-{secrets.token_hex(6)}"
        place = self.root / "layers" / name
        held = os.open(f"{place}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            place.mkdir(mode=0o755)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
            Path(f"{place}.lock").unlink(missing_ok=True)
            os.close(held)

    def keep(self, draft: Path, record: LayerRecord) -> None:
        """Makes a written folder a layer, and pins it. When there is such a layer already, that one is taken. Raises ImageError."""
        with self._changes():
            if self.record(record.digest) is None:
                self._make_room(record.bytes)
                place = self.layer_folder(record.digest)
                self._discard(place)
                draft.rename(place)
                write(self._record_path(record.digest), msgspec.json.encode(record))
            self.pin(record.digest)

    def record(self, layer: str) -> LayerRecord | None:
        """What is known of a layer; None when it is not there whole."""
        try:
            return msgspec.json.decode(self._record_path(layer).read_bytes(), type=LayerRecord)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def save(self, image: Image, name: str | None = None) -> str:
        """Records an image, whose layers are pinned; returns its digest. A name moves to its newest image. Raises ImageError."""
        if name is not None and not _NAME.fullmatch(name):
            raise ImageError(f"{name[:200]!r} is no name for an image: letters, digits and . _ / : @ + - only, at most 120")
        digest = image.digest
        with self._changes():
            write(self._image_path(digest), msgspec.json.encode(image))
            if name is not None:
                write(self._name_path(name), digest.encode())
            self._make_room(0)
        return digest

    def find(self, wanted: str) -> Image:
        """By name, digest, or at least twelve digits of one. Raises ImageError naming the nearest name."""
        digest = self._read(self._name_path(wanted)) if _NAME.fullmatch(wanted) else None
        match = _DIGEST.fullmatch(wanted)
        if digest is None and match:
            fitting = [path.stem for path in (self.root / "images").glob(f"{match[1]}*.json")]
            if len(fitting) > 1:
                raise ImageError(f"{wanted!r} is the start of {len(fitting)} images' digests; give more digits")
            digest = f"sha256:{fitting[0]}" if fitting else None
        image = None if digest is None else self._image(digest)
        if image is None:
            raise ImageError(_not_found(wanted, self.names()))
        return image

    def use(self, image: Image, *, fleeting: bool = False) -> Use:
        """Pins an image's layers and counts as a use of it. Raises ImageError when they were removed."""
        pinned: list[str] = []
        try:
            for layer in image.layers:
                self.pin(layer)
                pinned.append(layer)
        except BaseException:
            Use(self, tuple(pinned)).release()
            raise
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._image_path(image.digest))
        return Use(self, tuple(pinned), fleeting=fleeting)

    def step(self, key: str) -> Image | None:
        """What a step of an earlier build came to, if that is still there."""
        digest = self._read(self.root / "steps" / _hex(key))
        image = None if digest is None else self._image(digest)
        return image if image is not None and all(self.record(layer) for layer in image.layers) else None

    def remember_step(self, key: str, digest: str) -> None:
        """For `step`."""
        write(self.root / "steps" / _hex(key), digest.encode())

    def names(self) -> dict[str, str]:
        """Digests by name."""
        paths = [path for path in (self.root / "names").iterdir() if not path.name.startswith(".")]
        found = {path.name.replace("_s", "/").replace("_u", "_"): self._read(path) for path in paths}
        return {name: digest for name, digest in found.items() if digest}

    def digests(self) -> frozenset[str]:
        """Of all images."""
        return frozenset(f"sha256:{path.stem}" for path in (self.root / "images").glob("[0-9a-f]*.json"))

    def list(self) -> list[Stored]:
        """All images, the least recently used first."""
        names = self.names()
        sizes = self._sizes()
        found = []
        for path in (self.root / "images").glob("[0-9a-f]*.json"):
            digest = f"sha256:{path.stem}"
            image, used_at = self._image(digest), _changed_at(path)
            if image is None:
                continue
            own = tuple(sorted(name for name, meant in names.items() if meant == digest))
            found.append(
                Stored(
                    image=image,
                    digest=digest,
                    names=own,
                    bytes=sum(sizes.get(layer, 0) for layer in image.layers),
                    used_at=used_at,
                    in_use=bool(image.layers) and self._is_used(image.layers[-1]),
                    kept=any(name.startswith((KEPT, SERVED)) for name in own),
                )
            )
        return sorted(found, key=lambda one: (one.used_at, one.digest))

    def remove(self, wanted: str) -> Stored:
        """Forgets a name, or an image with all its names, and removes the layers nobody needs. Raises ImageError while it is used."""
        with self._changes():
            digest = self.find(wanted).digest
            stored = next(one for one in self.list() if one.digest == digest)
            if wanted in stored.names and len(stored.names) > 1:
                self._name_path(wanted).unlink(missing_ok=True)
                return stored
            if stored.in_use:
                raise ImageError(f"image {wanted!r} is used by a live sandbox; stop it first")
            self._forget(stored)
            self._collect()
            return stored

    def unname(self, name: str) -> None:
        """Forgets a name. Its image goes when room is needed."""
        with self._changes():
            self._name_path(name).unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        """Forgets a name, and at once its image when that has no other; layers that live sandboxes use go later. Idempotent."""
        with self._changes():
            digest = self._read(self._name_path(name))
            self._name_path(name).unlink(missing_ok=True)
            if digest is not None and digest not in self.names().values():
                self._image_path(digest).unlink(missing_ok=True)
                self._collect()

    def prune(self, limit_bytes: int = 0) -> int:
        """Removes unused images until at most `limit_bytes` are left. Returns the bytes freed."""
        with self._changes():
            before = self.total_bytes()
            self._shrink(limit_bytes)
            return before - self.total_bytes()

    def collect(self) -> None:
        """Removes layers that no image names and nobody uses, and what killed processes left."""
        with self._changes():
            self._collect()

    def total_bytes(self) -> int:
        """Of all layers."""
        return sum(self._sizes().values())

    def pin(self, layer: str) -> None:
        """Keeps a layer from being removed. Raises ImageError when it is not there."""
        with self._guard:
            descriptor, count = self._pins.get(layer, (-1, 0))
            if count == 0:
                descriptor = hold(self._record_path(layer))
            self._pins[layer] = (descriptor, count + 1)

    def unpin(self, layer: str) -> None:
        """Undoes one `pin`."""
        with self._guard:
            descriptor, count = self._pins.pop(layer, (-1, 0))
            if count > 1:
                self._pins[layer] = (descriptor, count - 1)
            elif descriptor >= 0:
                os.close(descriptor)

    def disown(self) -> None:
        """In a forked child: the pins are the parent's."""
        for descriptor, _ in self._pins.values():
            os.close(descriptor)
        self._pins = {}
        self._guard, self._changing, self._depth = threading.Lock(), threading.RLock(), 0

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        """Alone among all threads and processes."""
        with self._changing:
            if self._depth == 0:
                self._lock = lock(self.root / "lock")
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    os.close(self._lock)

    def _make_room(self, more: int) -> None:
        if self.total_bytes() + more <= self.limit_bytes:
            return
        self._shrink(self.limit_bytes - more)
        if self.total_bytes() + more > self.limit_bytes:
            raise ImageError(
                f"the image store may hold {self.limit_bytes} bytes and what live sandboxes and stopped ones use leaves no room; "
                "stop some, or raise SANDMILL_IMAGES_BYTES"
            )

    def _shrink(self, limit_bytes: int) -> None:
        self._collect()
        for stored in self.list():
            if self.total_bytes() <= limit_bytes:
                return
            if not stored.in_use and not stored.kept:
                self._forget(stored)
                self._collect()

    def _forget(self, stored: Stored) -> None:
        for name in stored.names:
            self._name_path(name).unlink(missing_ok=True)
        self._image_path(stored.digest).unlink(missing_ok=True)

    def _collect(self) -> None:
        needed = {layer for path in (self.root / "images").glob("[0-9a-f]*.json") for layer in self._layers(f"sha256:{path.stem}")}
        for layer in set(self._sizes()) - needed:
            path = self._record_path(layer)
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(descriptor)
                self._discard(self.layer_folder(layer))
        for step in (self.root / "steps").iterdir():
            digest = self._read(step)
            if digest is None or not self._image_path(digest).exists():
                step.unlink(missing_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        """Removes folders without a record, and drafts whose writer is dead."""
        known = {folder_name(layer) for layer in self._sizes()}
        for place in (self.root / "layers").iterdir():
            if place.suffix == ".lock" or place.name in known:
                continue
            if not place.name.startswith(".new-") or is_free(Path(f"{place}.lock")):
                self._discard(place)
                Path(f"{place}.lock").unlink(missing_ok=True)
        for left in (self.root / "layers").glob(".new-*.lock"):
            with contextlib.suppress(FileNotFoundError):
                if not left.with_suffix("").exists() and time.time() - left.stat().st_mtime > LOCK_S and is_free(left):
                    left.unlink()

    def _discard(self, place: Path) -> None:
        gone = place.with_name(f".old-{secrets.token_hex(6)}")
        with contextlib.suppress(FileNotFoundError):  # its own writer may have removed it just now
            place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _sizes(self) -> dict[str, int]:
        records = (self.record(path.stem) for path in (self.root / "records").glob("[0-9a-f]*.json"))
        return {record.digest: record.bytes for record in records if record is not None}

    def _is_used(self, layer: str) -> bool:
        return not is_free(self._record_path(layer))

    def _layers(self, digest: str) -> Sequence[str]:
        image = self._image(digest)
        return () if image is None else image.layers

    def _image(self, digest: str) -> Image | None:
        data = self._read(self._image_path(digest))
        try:
            return None if data is None else msgspec.json.decode(data, type=Image)
        except msgspec.MsgspecError:
            return None

    def _name_path(self, name: str) -> Path:
        """At most 240 bytes long: a slash takes two of its own kind and nothing else is longer than itself."""
        return self.root / "names" / name.replace("_", "_u").replace("/", "_s")

    def _image_path(self, digest: str) -> Path:
        return self.root / "images" / f"{digest.removeprefix('sha256:')}.json"

    def _record_path(self, layer: str) -> Path:
        return self.root / "records" / f"{layer.removeprefix('sha256:')}.json"

    @staticmethod
    def _read(path: Path) -> str | None:
        try:
            return path.read_text()
        except (FileNotFoundError, OSError, UnicodeError):
            return None


KEPT: Final = "stopped/"
"""Names of what stopped sandboxes left: never evicted, only removed by name."""
SERVED: Final = "served/"
"""Names of what a server's objects need: never evicted either."""


def _changed_at(path: Path) -> float:
    """0 for a file that another process has removed meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _hex(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _not_found(wanted: str, names: dict[str, str]) -> str:
    import difflib

    near = difflib.get_close_matches(wanted[:300], names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "; see `sandmill image ls`, or give oci:PATH or docker-archive:PATH"
    return f"no image {wanted[:200]!r} in the store{hint}"


_stores: dict[Path, Store] = {}
_guard = threading.Lock()


def store() -> Store:
    """The store of the present state folder."""
    root = state.layers_root().parent
    with _guard:
        if root not in _stores:
            _stores[root] = Store(root, _limit())
        return _stores[root]


def _limit() -> int:
    from sandmill.config.quantities import parse_bytes

    named = os.environ.get("SANDMILL_IMAGES_BYTES")
    return DEFAULT_LIMIT_BYTES if named is None else parse_bytes(named, field="SANDMILL_IMAGES_BYTES")


def _forget() -> None:
    global _guard
    _guard = threading.Lock()
    for one in _stores.values():
        one.disown()
    _stores.clear()


os.register_at_fork(after_in_child=_forget)
