"""What outlasts a sandbox on a server, over the wire. In: a live sandbox's name. Out: images in its project, copies, the same one later.

Image objects of the project take the place of this machine's store: a name is a tag, `stopped/<id>` among them. A stop that keeps
files is an image and the end of the object; a start is an object of the same name from that image.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec

from sandmill.errors import ImageError, SandboxError, SandboxGone
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.backends.remote.client import WAIT_FOR_ROOM_S, AnswerError, Client, object_of
from sandmill.sandboxes.backends.remote.http import Answer
from sandmill.sandboxes.backends.remote.wiring import creation
from sandmill.sandboxes.dual import dual, loop
from sandmill.sandboxes.egress.blocked import Blocked
from sandmill.sandboxes.images import Image, Use
from sandmill.sandboxes.images.store import KEPT
from sandmill.sandboxes.sandbox import Sandbox
from sandmill.sandboxes.spec import Continuity, EgressMode, SandboxSpec

NAME: Final = "sandmill.dev/name"
_MADE_WITHIN_S: Final = 600.0
_POLL: Final = "30s"
_AGAIN_FOR_S: Final = 15.0
_PAUSE_S: Final = 0.05
OVER: Final = ("NotFound", "SandboxNotRunning", "SandboxFailed", "BudgetExceeded")


class RemotePreserving(Sandbox):
    """The part of `RemoteSandbox` that outlasts it."""

    _client: Client
    _kept_name: str | None = None
    """The Image object that its kept files are in."""
    _blocked: tuple[Blocked, ...] = ()

    @abc.abstractmethod
    async def _ask(self, method: str, path: str, **options: Any) -> Answer:
        """One request about it. Raises SandboxGone, ConfigError."""

    @abc.abstractmethod
    async def answers(self, *, written: bool = False) -> None:
        """Returns once it is up. Raises SandboxError."""

    @abc.abstractmethod
    def _twin(self, value: Mapping[str, Any], name: str | None) -> Sandbox:
        """Another sandbox of the same spec."""

    @abc.abstractmethod
    def _over(self, reason: str) -> SandboxGone:
        """It has ended."""

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """What its network policy refused so far. Asks the server, but on the sandbox loop, where it is what was heard last."""
        try:
            home = asyncio.get_running_loop() is loop()
        except RuntimeError:
            home = False
        return self._blocked if home else self.list_blocked()

    @dual
    async def list_blocked(self) -> tuple[Blocked, ...]:
        """`blocked`, asked for; what was heard last when there is no answer."""
        if self.spec.network.mode is not EgressMode.DENY and self.alive:
            with contextlib.suppress(AnswerError, ConnectionError, msgspec.ValidationError):
                items = object_of(await self._client.ask("GET", f"sandboxes/{self.id}/blocked")).get("items")
                self._blocked = msgspec.convert(items, tuple[Blocked, ...])
        return self._blocked

    @dual
    async def snapshot_filesystem(self, name: str | None = None) -> Image:
        """As on this machine; the image is an object of its project, and `name` a tag of it."""
        return (await self._image_of(name))[0]

    @dual
    async def fork(self, n: int, *, name: str | None = None) -> list[Sandbox]:
        """As on this machine: all or none."""
        if n < 1:
            raise ImageError(f"a sandbox can be forked into one or more, not {n}")
        items = (await self._make("POST", f"sandboxes/{self.id}/fork", {"count": n}))["items"]
        names = [None if name is None else f"{name}-{number}" for number in range(n)]
        return [self._twin(value, called) for value, called in zip(items, names, strict=True)]

    @dual
    async def freeze(self) -> None:
        """As on this machine."""
        await self._ask("POST", f"sandboxes/{self.id}/freeze", json={})
        self._frozen = True

    @dual
    async def thaw(self) -> None:
        """As on this machine."""
        await self._ask("POST", f"sandboxes/{self.id}/thaw", json={})
        self._frozen = False

    @dual
    async def halt(self, *, keep: bool | None = None) -> Image | None:
        """As on this machine; the files are an image of its project with the tag `stopped/<id>`."""
        if self.alive and (self.spec.continuity is Continuity.SNAPSHOTTED if keep is None else keep):
            await self.kill_processes.aio()
            before = self._kept_name
            self.kept, self._kept_name = await self._image_of(KEPT + self.id)
            await self._remove_image(before)
        await self.stop("stopped")
        return self.kept

    @dual
    async def start(self) -> Self:
        """As on this machine. One that its server stopped, idle for too long, goes on with the workspace that was kept then."""
        status = await self._status()
        if status is not None and status["phase"] in ("Stopped", "Stopping"):
            wish = {"nodus.dev/start-requested-at": str(loop().time())}
            change = {"spec": {"state": "Running"}, "metadata": {"annotations": wish}}
            self._gone = None
            await self._ask("PATCH", f"sandboxes/{self.id}", json=change, headers={"Content-Type": "application/merge-patch+json"})
        elif self.alive and status is not None and status["phase"] != "Failed":
            raise SandboxError(f"sandbox {self.name} is running; stop it first")
        else:
            await self.stop("stopped")
            await self._recreate()
        try:
            await self.answers()
        except BaseException:
            await asyncio.shield(self.stop("it could not be started again"))
            raise
        self.kept = None
        return self

    async def forget_files(self) -> None:
        """What a stop kept is no longer wanted."""
        self.kept, name, self._kept_name = None, self._kept_name, None
        await self._remove_image(name)

    async def _status(self) -> dict[str, Any] | None:
        """What its server says of it, None when it is not there. Raises SandboxGone when there is no answer."""
        try:
            status: dict[str, Any] = object_of(await self._client.ask("GET", f"sandboxes/{self.id}"))["status"]
        except ConnectionError as error:
            raise SandboxGone(self.name, str(error)) from error
        except AnswerError as error:
            if error.reason != "NotFound":
                raise error.of_sandbox(self.name) from error
            return None
        return status

    async def _recreate(self) -> None:
        """A new object under the old name."""
        spec = self.spec if self.kept is None else msgspec.structs.replace(self.spec, image=self.kept.digest)
        body = {"metadata": {"name": self.id, "annotations": name_note(self.name)}, "spec": creation(spec)}
        ends = loop().time() + _AGAIN_FOR_S
        while True:
            try:
                await self._client.create(body)
                break
            except AnswerError as error:
                if error.reason != "AlreadyExists" or loop().time() > ends:
                    raise error.of_creation() from error
            await asyncio.sleep(_PAUSE_S)  # the old one is being removed
        self.spec, self._gone, self._frozen = spec, None, False

    async def _image_of(self, tag: str | None) -> tuple[Image, str]:
        """A new image and its object's name. Raises ImageError, SandboxGone."""
        spec = {"fromSandbox": {"name": self.id}, "tags": [] if tag is None else [tag]}
        value = await self._make("POST", "images", {"metadata": {"generateName": f"{self.id[:56]}-"}, "spec": spec}, refusal=ImageError)
        name, ends = str(value["metadata"]["name"]), loop().time() + _MADE_WITHIN_S
        while value["status"]["phase"] not in ("Ready", "Failed"):
            if loop().time() > ends:
                raise ImageError(f"the image {name} of sandbox {self.name} was not made within {_MADE_WITHIN_S:.0f} s")
            value = object_of(await self._ask("GET", f"images/{name}", query={"wait": _POLL}))
        if value["status"]["phase"] == "Failed":
            await self._remove_image(name)
            raise ImageError(str(value["status"].get("message", "the server could not make the image")))
        return image_in(value["status"]), name

    async def _remove_image(self, name: str | None) -> None:
        if name is not None:
            with contextlib.suppress(AnswerError, ConnectionError):
                await self._client.ask("DELETE", f"images/{name}")

    async def _learn_image(self) -> None:
        pinned = object_of(await self._ask("GET", f"sandboxes/{self.id}"))["status"].get("image")
        if pinned is not None:
            self._image = image_in(pinned)

    async def _make(self, method: str, path: str, body: Mapping[str, Any], *, refusal: type[SandboxError] | None = None) -> dict[str, Any]:
        """A request that makes something of it; waits for room. Raises SandboxGone, or what a creation raises, or `refusal`."""
        if self._gone is not None:
            raise SandboxGone(self._gone.sandbox, self._gone.reason)
        try:
            return object_of(await self._client.ask(method, path, json=body, room_s=WAIT_FOR_ROOM_S))
        except ConnectionError as error:
            raise SandboxGone(self.name, str(error)) from error
        except AnswerError as error:
            if error.reason in OVER:
                raise self._over(error.message) from error
            raise (error.of_creation() if refusal is None else refusal(error.message)) from error

    def _live(self) -> Agent:
        raise SandboxError(f"sandbox {self.name} is on a server; only that talks to its init")

    async def _revive(self, spec: SandboxSpec, image: Image, use: Use | None) -> None:
        self._live()


def name_note(name: str | None) -> dict[str, str]:
    """A sandbox's own name, which is any string, beside the object's."""
    return {NAME: name[:1000].encode("ascii", "backslashreplace").decode()} if name else {}


def image_in(status: Mapping[str, Any]) -> Image:
    """The image that a status describes. Raises ImageError."""
    try:
        image = msgspec.convert(status.get("config"), Image)
    except msgspec.ValidationError as error:
        raise ImageError(f"the server describes an image in words of another version: {error}") from error
    if image.digest != status.get("digest"):
        raise ImageError("the server describes an image that its digest does not name; it is of another version")
    return image
