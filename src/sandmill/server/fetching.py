"""Images of another machine, fetched into this one's store. In: a digest, and whom to ask. Out: the image, whole; or why not.

Layers come as parcels, piece by piece; after a broken connection it goes on at the same piece. Nothing is unpacked before its digest is
right, and nothing is a layer before it is unpacked whole. All who want a layer at one time share its transfer, which ends when nobody
wants it any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import ImageError
from sandmill.sandboxes.backends.remote.client import AnswerError, Client
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images import Image, store
from sandmill.sandboxes.images.image import MOST_LAYERS
from sandmill.sandboxes.images.layers import Budget
from sandmill.sandboxes.images.parcels import Parcel, unpack
from sandmill.sandboxes.images.store import LayerRecord
from sandmill.server.refusals import EXHAUSTED, Refusal
from sandmill.server.shipping import Shown

FETCH_S: Final = 900.0
"""All layers of one image together."""
_TRIES: Final = 2
_PACKING_S: Final = 300.0
_PIECES: Final = "pieces"
_log = logging.getLogger("sandmill.server")


class Origin:
    """A machine that images are fetched from. `believed`: its layers are called here what it calls them; those of others are called by what
    is in them, so that nobody can put other files under a name that somebody else relies on."""

    def __init__(self, client: Client, path: str, name: str, *, believed: bool) -> None:
        self.client = client
        self.name = name
        self.believed = believed
        self._path = path

    async def image(self, digest: str) -> Shown:
        """Its account of an image, which must be the one. Raises AnswerError, ConnectionError, ImageError."""
        answer = await self.client.ask("GET", f"{self._path}images/{digest}")
        try:
            shown = msgspec.json.decode(answer.body, type=Shown)
        except msgspec.MsgspecError as error:
            raise ImageError(f"{self.name} describes an image in words of another version") from error
        if shown.image.digest != digest or len(shown.layers) > MOST_LAYERS:
            raise ImageError(f"{self.name} describes another image than {digest}; it is of another version, or damaged")
        if tuple(layer.digest for layer in shown.layers) != shown.image.layers:
            raise ImageError(f"{self.name} lists other layers than image {digest} has; it is of another version, or damaged")
        return shown

    async def parcel(self, layer: str) -> Parcel:
        """What a layer's pieces must come to. Raises AnswerError, ConnectionError, ImageError."""
        answer = await self.client.ask("GET", f"{self._path}layers/{layer}", room_s=_PACKING_S)
        try:
            return msgspec.json.decode(answer.body, type=Parcel)
        except msgspec.MsgspecError as error:
            raise ImageError(f"{self.name} describes a layer in words of another version") from error

    async def piece(self, layer: str, offset: int) -> bytes:
        """Some bytes; none at the end. Raises AnswerError, ConnectionError."""
        where = f"{self._path}layers/{layer}/{_PIECES}"
        return (await self.client.ask("GET", where, query={"offset": str(offset)}, room_s=_PACKING_S)).body


class _Transfer:
    """One layer on its way. Its layer stays pinned until the last of those who wait has pinned it too."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task = task
        self.waiting = 0


class Fetching:
    """All that comes from one machine. On the event loop only."""

    def __init__(self, origin: Origin, folder: Path) -> None:
        self._origin = origin
        self._folder = folder / "arriving"
        self._transfers: dict[str, _Transfer] = {}

    async def image(self, digest: str, name: str | None = None) -> Image:
        """The image, in this store, called `name` too. Its digest is another one only if the origin is not believed.

        Raises Refusal (CapacityUnavailable: no room for it here; Unavailable: it did not come; ImageNotFound).
        """
        pinned: list[str] = []
        try:
            async with asyncio.timeout(FETCH_S):
                shown = await self._origin.image(digest)
                for record in shown.layers:
                    pinned.append(await self._layer(record))
                image = msgspec.structs.replace(shown.image, layers=_once(pinned))
                await in_thread(lambda: store().save(image, name))
                return image
        except AnswerError as error:
            reason = error.reason if error.reason in ("ImageNotFound", "CapacityUnavailable") else "Unavailable"
            raise Refusal(reason, f"{self._origin.name} does not give image {digest}: {error.message}", retry_after_s=5) from error
        except ImageError as error:
            raise Refusal("Unavailable", str(error), retry_after_s=5) from error
        except TimeoutError:
            raise Refusal("Unavailable", f"image {digest} did not come within {FETCH_S:.0f} s", retry_after_s=5) from None
        except OSError as error:
            reason = "CapacityUnavailable" if error.errno in EXHAUSTED else "Unavailable"
            message = f"image {digest} could not be fetched from {self._origin.name}: {error.strerror or error}"
            raise Refusal(reason, message, retry_after_s=5) from error
        finally:
            for layer in pinned:
                store().unpin(layer)

    async def _layer(self, record: LayerRecord) -> str:
        """What a layer is called here, pinned for the caller."""
        known = await in_thread(lambda: _pinned(record.digest), lambda pinned: store().unpin(record.digest) if pinned else None)
        if known:
            return record.digest
        transfer = self._transfers.get(record.digest)
        if transfer is None:
            task = asyncio.get_running_loop().create_task(self._fetch(record))
            transfer = self._transfers[record.digest] = _Transfer(task)
        transfer.waiting += 1
        try:
            own = await asyncio.shield(transfer.task)
            store().pin(own)
            return own
        finally:
            transfer.waiting -= 1
            if not transfer.waiting:
                del self._transfers[record.digest]
                self._let_go(transfer.task)

    def _let_go(self, task: asyncio.Task[str]) -> None:
        """Nobody wants this layer of it any more."""
        if not task.done():
            task.cancel()
            task.add_done_callback(self._let_go)
        elif not task.cancelled() and task.exception() is None:
            store().unpin(task.result())

    async def _fetch(self, record: LayerRecord) -> str:
        """A layer into the store, pinned. Raises ImageError, AnswerError, OSError, Refusal."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / secrets.token_hex(8)
        try:
            for left in reversed(range(_TRIES)):
                parcel = await self._origin.parcel(record.digest)
                damage = await self._receive(record.digest, parcel, path)
                if damage is None:
                    break
                _log.warning("layer %s came damaged from %s: %s", record.digest, self._origin.name, damage)
                if not left:
                    raise Refusal("Unavailable", f"layer {record.digest} came damaged from {self._origin.name}: {damage}", retry_after_s=5)
            return await in_thread(lambda: self._keep(record, path), lambda own: store().unpin(own))
        finally:
            path.unlink(missing_ok=True)

    async def _receive(self, layer: str, parcel: Parcel, path: Path) -> str | None:
        """A parcel into a file; what is wrong with it, None when it is what it should be."""
        found, size = hashlib.sha256(), 0
        if parcel.size > store().limit_bytes:
            return f"it has {parcel.size} bytes, more than this machine's image store may hold"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            while size < parcel.size and (data := await self._origin.piece(layer, size)):
                size += len(data)
                found.update(data)
                await in_thread(lambda data=data: file.write(data))  # type: ignore[misc]
        if size != parcel.size:
            return f"it has {size} bytes and should have {parcel.size}"
        if f"sha256:{found.hexdigest()}" != parcel.digest:
            return f"its digest is sha256:{found.hexdigest()} and should be {parcel.digest}"
        return None

    def _keep(self, record: LayerRecord, path: Path) -> str:
        """Unpacks a parcel that is what it should be. Blocks."""
        place, budget = store(), Budget(max_bytes=store().limit_bytes)
        with place.draft() as draft:
            own = unpack(path, draft, budget)
            if self._origin.believed:
                own = record.digest
            try:
                place.keep(draft, LayerRecord(digest=own, bytes=budget.bytes, opaque=record.opaque))
            except ImageError as error:
                raise Refusal("CapacityUnavailable", str(error), retry_after_s=5) from error
        return own


class Supply:
    """What a node's head wants to be there before a sandbox starts from it. On the event loop only."""

    def __init__(self, fetching: Fetching) -> None:
        self._fetching = fetching
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By digest; one that has failed stays until somebody has been told."""

    async def until(self, digest: str, wait_s: float) -> bool:
        """Whether the image is in this store, after at most `wait_s` seconds; it goes on coming meanwhile. Raises Refusal."""
        task = self._tasks.get(digest)
        if task is None:
            task = self._tasks[digest] = asyncio.get_running_loop().create_task(self._bring(digest))
        done, _ = await asyncio.wait([task], timeout=wait_s)
        if not done:
            return False
        if self._tasks.get(digest) is task:
            del self._tasks[digest]
        task.result()
        return True

    async def close(self) -> None:
        """Brings nothing more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _bring(self, digest: str) -> None:
        if not await in_thread(lambda: _touched(digest)):
            await self._fetching.image(digest)


def clear(folder: Path) -> None:
    """Removes what a killed server was fetching. Before the first fetch."""
    shutil.rmtree(folder / "arriving", ignore_errors=True)


def _pinned(layer: str) -> bool:
    if store().record(layer) is None:
        return False
    try:
        store().pin(layer)
    except ImageError:
        return False
    return True


def _touched(digest: str) -> bool:
    """Whether an image is here whole; if so, it was used just now."""
    try:
        store().use(store().find(digest)).release()
    except ImageError:
        return False
    return True


def _once(layers: list[str]) -> tuple[str, ...]:
    """Without repetitions: a layer that is there twice shows where it is topmost."""
    return tuple(reversed(dict.fromkeys(reversed(layers))))
