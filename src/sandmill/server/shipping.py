"""Layers of this machine's store, handed out piece by piece. In: a layer's digest, an offset. Out: its parcel's digest and size; bytes.

A parcel is packed once for all who ask for it, lies in a file while it is asked for, and goes some minutes after the last time.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import time
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import ImageError
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images import Image, store
from sandmill.sandboxes.images.parcels import Parcel, pack
from sandmill.sandboxes.images.store import LayerRecord
from sandmill.server.refusals import EXHAUSTED, Refusal

PIECE: Final = 8 << 20
_KEPT_S: Final = 300.0
_MOST: Final = 32
_PACKING_AT_ONCE: Final = 2
_WAIT_S: Final = 30.0


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """An image as another machine has to know it to have it too."""

    image: Image
    layers: tuple[LayerRecord, ...]


class _Packed:
    """One parcel, packed or being packed."""

    def __init__(self, path: Path, task: asyncio.Task[Parcel]) -> None:
        self.path = path
        self.task = task
        self.used = time.monotonic()


class Shipping:
    """The parcels of one server. On the event loop only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "parcels"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._packed: dict[str, _Packed] = {}
        self._room = asyncio.Semaphore(_PACKING_AT_ONCE)

    async def image(self, digest: str) -> Shown:
        """Raises Refusal (ImageNotFound)."""
        return await asyncio.to_thread(_shown, digest)

    async def parcel(self, layer: str) -> Parcel:
        """What a layer's pieces come to. Raises Refusal (ImageNotFound, CapacityUnavailable; Unavailable while it is being packed)."""
        packed = self._of(layer)
        done, _ = await asyncio.wait([packed.task], timeout=_WAIT_S)
        if not done:
            raise Refusal("Unavailable", f"layer {layer} is being packed", retry_after_s=1)
        try:
            return packed.task.result()
        except ImageError as error:
            raise Refusal("ImageNotFound", str(error)) from error
        except OSError as error:
            reason = "CapacityUnavailable" if error.errno in EXHAUSTED else "InternalError"
            raise Refusal(reason, f"layer {layer} could not be packed: {error.strerror}", retry_after_s=5) from error

    async def piece(self, layer: str, offset: int) -> bytes:
        """At most PIECE bytes of its parcel from `offset` on; none at the end. Raises Refusal."""
        await self.parcel(layer)
        path = self._of(layer).path
        return await asyncio.to_thread(_read, path, offset)

    def layers_of(self, image: str) -> frozenset[str]:
        """An image's layers; none when it is not there."""
        try:
            return _layers(image)
        except ImageError:
            return frozenset()

    def close(self) -> None:
        """Packs nothing more."""
        for packed in self._packed.values():
            packed.task.cancel()
        self._packed.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of(self, layer: str) -> _Packed:
        packed = self._packed.get(layer)
        if packed is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / layer.removeprefix("sha256:")
            task = asyncio.get_running_loop().create_task(self._pack(layer, path))
            packed = self._packed[layer] = _Packed(path, task)
            task.add_done_callback(lambda done: self._over(layer, packed))
        packed.used = time.monotonic()
        return packed

    async def _pack(self, layer: str, path: Path) -> Parcel:
        async with self._room:
            return await in_thread(lambda: pack(layer, store(), path))

    def _over(self, layer: str, packed: _Packed | None) -> None:
        """A parcel that could not be packed is forgotten at once, one that could after some time."""
        assert packed is not None
        if packed.task.cancelled() or packed.task.exception() is not None:
            self._drop(layer, packed)
            return
        while len(self._packed) > _MOST:
            self._drop(*min(self._packed.items(), key=lambda item: item[1].used))
        self._expire(layer, packed)

    def _expire(self, layer: str, packed: _Packed) -> None:
        left = packed.used + _KEPT_S - time.monotonic()
        if left <= 0:
            self._drop(layer, packed)
        elif self._packed.get(layer) is packed:
            asyncio.get_running_loop().call_later(left, self._expire, layer, packed)

    def _drop(self, layer: str, packed: _Packed) -> None:
        if self._packed.get(layer) is packed:
            del self._packed[layer]
            packed.path.unlink(missing_ok=True)


@functools.lru_cache(maxsize=4096)
def _layers(digest: str) -> frozenset[str]:
    return frozenset(store().find(digest).layers)


def _shown(digest: str) -> Shown:
    try:
        image = store().find(digest)
    except ImageError as error:
        raise Refusal("ImageNotFound", str(error)) from error
    records = [store().record(layer) for layer in image.layers]
    if None in records:
        raise Refusal("ImageNotFound", f"layers of image {digest} were removed from the store")
    return Shown(image=image, layers=tuple(record for record in records if record is not None))


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), PIECE, offset)
    except FileNotFoundError:
        raise Refusal("Unavailable", "the layer has to be packed again", retry_after_s=1) from None
    except OSError as error:
        raise Refusal("InternalError", f"a layer's parcel could not be read: {os.strerror(error.errno or errno.EIO)}") from error
