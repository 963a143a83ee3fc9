"""A sandbox on a node, as its head holds it. In: a spec as the API stores it and the node's client. Out: the same `Sandbox` as one of this
machine; its kept folder, and images of it, brought over and taken along piece by piece.

The node holds an object of its own for it, which neither idles nor ages nor costs anything there: all that is the head's to watch.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sandmill.errors import ConfigError, ImageError, SandboxCreateFailed, SandboxFileError, SandboxGone
from sandmill.sandboxes import SandboxSpec
from sandmill.sandboxes.backends.remote.client import AnswerError, Client, object_of
from sandmill.sandboxes.backends.remote.process import RemoteProcess
from sandmill.sandboxes.backends.remote.sandbox import RemoteSandbox
from sandmill.sandboxes.images import Image
from sandmill.server.fetching import FETCH_S, Fetching, Origin

PIECE: Final = 8 << 20
_CREATE_S: Final = 60.0
_SAVE_S: Final = 120.0
_LOOK_S: Final = 0.05
_LONGEST_NAME: Final = 45
_POLL: Final = "30s"
_NODES_TROUBLE: Final = ("CapacityUnavailable", "Unavailable", "ImageNotFound")
"""Not the sandbox's own: it may start elsewhere, or later. ImageNotFound: the node's store has let go of what was brought a moment ago."""
_LONGEST_LIFE_S: Final = 720 * 3600
_MERGE: Final = {"Content-Type": "application/merge-patch+json"}
Value = Mapping[str, Any]


class NodeSandbox(RemoteSandbox):
    """A sandbox on a node."""

    def __init__(self, spec: SandboxSpec, client: Client, name: str, shown: str, labels: Mapping[str, str], *, rootless: bool) -> None:
        super().__init__(spec, client, {"metadata": {"name": name}}, shown, labels)
        self.rootless = rootless

    def lose(self, why: str) -> None:
        """It is known to have ended. On the sandbox loop."""
        self._over(why)

    async def save(self, target: Path) -> int:
        """Stops it on its node and writes its kept folder to `target`, whole or not at all; returns the size. Raises SandboxError."""
        async with asyncio.timeout(_SAVE_S):
            await self._patch({"state": "Stopped"})
            while (status := await self._now())["phase"] != "Stopped":
                if status["phase"] == "Failed":
                    raise SandboxGone(self.name, str(status.get("message", "it failed on its node")))
                await asyncio.sleep(_LOOK_S)
            saved = next((one for one in status.get("conditions", ()) if one["type"] == "StateSaved"), None)
            if saved is None or saved["status"] != "True":
                raise SandboxFileError(5, "its node could not save it" if saved is None else str(saved["message"]), "")
            return await self._fetch(target)

    async def bring(self, source: Path) -> None:
        """Before its first start: gives it the folder that an earlier run kept. Raises SandboxError, OSError."""
        with source.open("rb") as file:
            at = 0
            while data := await asyncio.to_thread(file.read, PIECE):
                await self._ask("PUT", f"sandboxes/{self.id}/kept", query={"offset": str(at)}, data=data)
                at += len(data)

    async def begin_there(self) -> None:
        """Waits until it is up on its node. Raises SandboxError."""
        async with asyncio.timeout(_CREATE_S):
            await self.list.aio(".")

    async def picture(self) -> tuple[Image, str]:
        """An image of its files in its node's store, and what it is called there. Raises ImageError, SandboxGone."""
        if self.rootless and not os.geteuid():
            raise ImageError(
                f"sandbox {self.name} is on a node without root, where files have no owners: its image would be of no use here"
            )
        return await self._image_of(None)

    async def brought(self, digest: str, name: str, folder: Path) -> Image:
        """Brings an image of its node into this machine's store, called `name`. Raises Refusal."""
        origin = Origin(self._client, "stored/", f"the node of sandbox {self.name}", believed=False)
        return await Fetching(origin, folder).image(digest, name)

    async def forget_picture(self, name: str) -> None:
        """The node need not keep it any more."""
        await self._remove_image(name)

    async def resume(self, process: Mapping[str, Any], skip: Mapping[str, int]) -> RemoteProcess:
        """A command of it that was started before; the first `skip` bytes of each stream have been taken already."""
        spec = process["spec"]
        interactive = bool(spec.get("stdin") or spec.get("tty"))
        taken = 0
        if interactive:
            answer = await self._ask("POST", f"processes/{process['metadata']['name']}/stdin", json={"seq": 0})
            taken = int(object_of(answer)["seq"])
        return RemoteProcess(
            *(self._client, self.name, dict(process)),
            text=False,
            max_output=2 << 20,
            stdin=bool(spec.get("stdin")),
            tty=bool(spec.get("tty")),
            skip=skip,
            sent=taken,
        )

    async def recall(self) -> None:
        """Learns again what an earlier client of it knew. Raises SandboxError."""
        self._frozen = bool((await self._now()).get("frozen"))

    async def processes(self) -> dict[str, dict[str, Any]]:
        """The node's objects of its commands that have not ended, by name."""
        answer = await self._ask("GET", "processes", query={"fieldSelector": f"spec.sandbox={self.id}"})
        found = object_of(answer)["items"]
        return {item["metadata"]["name"]: item for item in found}

    async def cancel(self, process: str) -> None:
        """Kills a command by its name on the node."""
        data = b'{"spec":{"state":"Cancelled"}}'
        await self._ask("PATCH", f"processes/{process}", data=data, headers=_MERGE)

    def _twin(self, value: Mapping[str, Any], name: str | None) -> RemoteSandbox:
        twin = NodeSandbox(self.spec, self._client, str(value["metadata"]["name"]), name or "", self.labels, rootless=self.rootless)
        twin._image = self._image
        return twin

    async def _fetch(self, target: Path) -> int:
        partial = target.with_suffix(".partial")
        partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        most, written = self.spec.disk_bytes * 2 + (16 << 20), 0
        try:
            with os.fdopen(os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
                while data := (await self._ask("GET", f"sandboxes/{self.id}/kept", query={"offset": str(written)})).body:
                    written += len(data)
                    if written > most:
                        raise SandboxFileError(27, "the kept folder is larger than the sandbox's disk", "")
                    await asyncio.to_thread(file.write, data)
                await asyncio.to_thread(_to_disk, file.fileno(), file.flush)
            partial.rename(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return written

    async def _now(self) -> dict[str, Any]:
        status = object_of(await self._ask("GET", f"sandboxes/{self.id}"))["status"]
        return dict(status)

    async def _patch(self, spec: Mapping[str, Any]) -> None:
        await self._ask("PATCH", f"sandboxes/{self.id}", data=msgspec.json.encode({"spec": spec}), headers=_MERGE)


async def create(client: Client, name: str, value: Value, made: SandboxSpec, kept: Path | None, *, rootless: bool) -> NodeSandbox:
    """Makes the sandbox on the node, as `name`. Raises SandboxError (nothing stays but what the node is told to end), ConfigError."""
    body = {"metadata": {"name": name}, "spec": wire(value["spec"], made, stopped=kept is not None)}
    meta = value["metadata"]
    sandbox = NodeSandbox(made, client, name, meta["name"], meta.get("labels", {}), rootless=rootless)
    try:
        if made.image is not None:
            await _supply(client, made.image)
        await client.ask("POST", "sandboxes", json=body)
        if kept is not None:
            await sandbox.bring(kept)
        await sandbox.begin_there()
    except BaseException as error:
        if isinstance(error, AnswerError):
            raise _failed(error) from error
        await asyncio.shield(sandbox.terminate.aio())
        if isinstance(error, ConnectionError | TimeoutError):
            raise SandboxCreateFailed(errno.EAGAIN, f"its node did not create it: {error or 'no answer'}") from error
        raise
    return sandbox


async def _supply(client: Client, digest: str) -> None:
    """Until the node has an image. Raises AnswerError, ConnectionError, SandboxCreateFailed; ImageError when it is here no more."""
    ends = asyncio.get_running_loop().time() + FETCH_S
    while True:
        try:
            answer = await client.ask("PUT", f"supplies/{digest}", query={"wait": _POLL})
        except AnswerError as error:
            if error.reason != "ImageNotFound":
                raise
            raise ImageError(error.message) from error
        if object_of(answer)["phase"] == "Ready":
            return
        if asyncio.get_running_loop().time() > ends:
            raise SandboxCreateFailed(errno.EAGAIN, f"its node has not fetched image {digest} within {FETCH_S:.0f} s")


def _failed(error: AnswerError) -> Exception:
    if error.reason in _NODES_TROUBLE:
        return SandboxCreateFailed(errno.EAGAIN, error.message)
    made = error.of_creation()
    return made if isinstance(made, ConfigError | ImageError | SandboxCreateFailed) else SandboxCreateFailed(error.message)


def new_name(name: str) -> str:
    """What a sandbox is called on its node: never the same twice."""
    return f"{name[:_LONGEST_NAME].rstrip('-')}-{secrets.token_hex(8)}"


def wire(spec: Value, made: SandboxSpec, *, stopped: bool) -> dict[str, Any]:
    """The spec as the node takes it: without the command, secrets, limits and money, which are the head's business."""
    return {
        "image": spec["image"] if made.image is None else made.image,
        "workingDir": spec["workingDir"],
        "env": [{"name": key, "value": word} for key, word in made.env.items()],
        "resources": dict(spec["resources"]),
        "network": dict(spec["network"]),
        "lifecycle": {"idleTimeout": "0s", "onIdle": "Delete", "maxLifetime": f"{min(_LONGEST_LIFE_S, round(made.timeout_s) + 60)}s"},
        "continuity": dict(spec["continuity"]),
        "state": "Stopped" if stopped else "Running",
    }


def _to_disk(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)
