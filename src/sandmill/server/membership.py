"""A node's side of being one. In: the server it joins, its own sandboxes. Out: beats; and the end of all it holds when nobody answers them.

A node that has had no answer for its lease ends every sandbox, since its head is about to take them for lost, and then begins a new epoch:
with another key, so that nothing the old one was told is believed any more. It never asks what it should run; it remembers nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import ConfigError, NodeRefused
from sandmill.sandboxes.backends.remote.client import AnswerError
from sandmill.sandboxes.images import store
from sandmill.server.beats import BEAT_S, VERSION, Beat
from sandmill.server.boxes import Boxes
from sandmill.server.head import Head
from sandmill.server.images import Images
from sandmill.server.keys import HEAD, Keys, fresh_key
from sandmill.server.machine import measured
from sandmill.server.records import Records
from sandmill.server.versions import VERSION_NUMBER

_LOOK_S: Final = 0.25
_LEAVE_S: Final = 25.0
_IMAGES_EVERY: Final = 10
_PICTURE_S: Final = 3600.0
"""How long an image of a sandbox may wait for the head to fetch it."""
_ENDED: Final = ("Stopped", "Failed")
_log = logging.getLogger("sandmill.server")


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told at its start."""

    head: str
    key: str
    name: str
    url: str | None
    """Where the head finds it; None: where it listens."""
    most: int
    labels: dict[str, str]


class Membership:
    """One node's membership. On the event loop only."""

    def __init__(
        self, joining: Joining, keys: Keys, records: Records, boxes: Boxes, images: Images, folder: Path, url: str, *, rootless: bool
    ) -> None:
        self._joining = joining
        self._head = Head(joining.head, joining.key)
        self._keys = keys
        self._records = records
        self._boxes = boxes
        self._pictures = images
        self._folder = folder
        self._url = joining.url or url
        self._rootless = rootless
        self._uid = ""
        self._lease_s = 0.0
        self._answered = time.monotonic()
        self._images: list[str] = []
        self._beats = 0
        self._leaving: float | None = None
        self._begin()

    def leave(self) -> None:
        """The node is to end: its head saves what can be saved first, for some seconds."""
        self._leaving = self._leaving or time.monotonic()

    async def join(self) -> None:
        """The first beat. Raises ConfigError when the head does not take this machine in."""
        try:
            await self._beat()
        except AnswerError as error:
            raise ConfigError(f"the server {self._joining.head} does not take this machine in: {error.message}", field="URL") from error
        except OSError as error:
            raise ConfigError(f"the server {self._joining.head} cannot be reached: {error or type(error).__name__}", field="URL") from error

    async def run(self) -> None:
        """Beats, until it has taken its leave. Raises NodeRefused when the head no longer wants this node."""
        while True:
            await asyncio.sleep(BEAT_S if self._leaving is None else _LOOK_S)
            try:
                await self._beat()
            except AnswerError as error:
                await self._refused(error)
            except OSError as error:
                _log.warning("the server %s cannot be reached: %s", self._joining.head, error or type(error).__name__)
            if self._leaving is not None and (not self._held() or time.monotonic() - self._leaving > _LEAVE_S):
                await self._last_word()
                return

    async def guard(self) -> None:
        """Ends everything when the lease is over, for ever. A loop of its own: a beat may hang for longer."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._lease_s and time.monotonic() - self._answered > self._lease_s:
                _log.warning("no answer from %s for %.0f s: all sandboxes end", self._joining.head, self._lease_s)
                await self._end_all()
                self._answered = time.monotonic()

    async def _beat(self) -> None:
        if self._beats % _IMAGES_EVERY == 0:
            self._images = await asyncio.to_thread(_images)
            await self._pictures.discard(_PICTURE_S)
        self._beats += 1
        sent, epoch = time.monotonic(), self._epoch
        told = await self._head.beat(self._joining.name, msgspec.json.encode(self._report()))
        if epoch != self._epoch:
            return
        # Counted from when the beat was sent: the head heard of it then or later, and waits longer than the lease.
        self._answered = sent
        self._uid, self._lease_s = str(told["uid"]), float(told["lease_s"])
        for name in told["end"]:
            self._boxes.soon(self._boxes.delete("default", str(name)))

    def _report(self) -> Beat:
        return Beat(
            version=VERSION,
            epoch=self._epoch,
            uid=self._uid,
            url=self._url,
            key=self._key,
            program=VERSION_NUMBER,
            machine=measured(self._folder),
            most=self._joining.most,
            rootless=self._rootless,
            labels=self._joining.labels,
            images=self._images,
            sandboxes=self._held(),
            leaving=self._leaving is not None,
        )

    def _held(self) -> dict[str, str]:
        """Every sandbox by name: nothing while it is well or was stopped as asked, otherwise why it ended."""
        out = {}
        for value in self._records.each("Sandbox"):
            status = value["status"]
            ended = status["phase"] in _ENDED and value["spec"]["state"] == "Running"
            out[value["metadata"]["name"]] = str(status.get("message") or status["phase"])[:300] if ended else ""
        return out

    async def _refused(self, error: AnswerError) -> None:
        if error.reason in ("Conflict", "NotFound"):
            await self._end_all()
            raise NodeRefused(f"the server {self._joining.head} no longer wants this node: {error.message}")
        if error.reason == "Expired":
            _log.warning("%s: all sandboxes end", error.message)
            await self._end_all()
        else:  # a key that was ended, a head that is not itself: the lease decides
            _log.warning("the server %s refuses: %s", self._joining.head, error.message)

    async def _last_word(self) -> None:
        """A head that is told goes on at once; one that is not finds out by itself."""
        try:
            await self._beat()
        except (AnswerError, OSError) as error:
            _log.warning("the server %s was not told that this node ends: %s", self._joining.head, error)

    async def _end_all(self) -> None:
        self._begin()
        ends = [self._boxes.delete("default", name) for name in self._held()]
        await asyncio.gather(*ends, self._pictures.discard(0.0), return_exceptions=True)

    def _begin(self) -> None:
        """A new epoch, known to the head from the next beat on."""
        self._epoch, self._key = secrets.token_hex(12), fresh_key()
        self._keys.give(self._key, HEAD, HEAD)


def _images() -> list[str]:
    """Digests of what the image store has."""
    return sorted(store().digests())
