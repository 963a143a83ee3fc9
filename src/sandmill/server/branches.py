"""What comes of a live sandbox besides its commands. In: a Sandbox's name. Out: images of it, copies of it, a still sandbox.

Each holds the sandbox's turn, so that nobody stops it half-way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from sandmill.errors import SandboxCreateFailed
from sandmill.sandboxes import Sandbox
from sandmill.server import layer, layer_images
from sandmill.server.boxes import Boxes
from sandmill.server.catalog import Catalog
from sandmill.server.layer_images import Made
from sandmill.server.live import Live
from sandmill.server.records import Records, Value, fresh
from sandmill.server.refusals import Refusal
from sandmill.server.secrets import Secrets
from sandmill.server.settings import Settings
from sandmill.server.statuses import first_status, loss_of
from sandmill.server.tables import Write

_COPIED: Final = ("image", "secretVersions")


class Branches:
    """Snapshots, forks, freezing."""

    def __init__(self, records: Records, boxes: Boxes, secrets: Secrets, catalog: Catalog, settings: Settings) -> None:
        self._records = records
        self._boxes = boxes
        self._secrets = secrets
        self._catalog = catalog
        self._settings = settings

    async def snapshot(self, project: str, name: str, called: str) -> Made:
        """An image of its files, `called` so in the store; of a stopped one, what it would start with. Raises Refusal, SandboxError."""
        if (value := self._records.get("Sandbox", project, name)) is not None and value["status"]["phase"] in ("Pending", "Starting"):
            await self._boxes.start(project, name)
        async with self._boxes.alone(project, name) as value:
            live = self._boxes.of(value)
            if live is not None:
                with live.in_use():
                    return await layer_images.snapshot(live.sandbox, called, live.secrets, self._settings.folder)
            if value["status"]["phase"] == "Failed" or (loss := loss_of(value)) is not None:
                why = value["status"].get("message") if value["status"]["phase"] == "Failed" else loss
                raise Refusal("SandboxNotRunning", f"sandbox {name!r} has no files any more: {why}", kind="sandboxes", name=name)
            pinned = await self._boxes.pinned(value)
            spec = layer.sandbox_spec(value["spec"], {}, None if pinned is None else pinned["digest"])
            return await layer_images.snapshot_of_stopped(spec, self._boxes.keeping.of(value), called, self._settings.folder)

    async def fork(
        self, project: str, name: str, count: int, beginning: str, answer: Callable[[Sequence[Value]], Write | None]
    ) -> Sequence[Value]:
        """New Sandbox objects, running, that start from its files as they are now: all, or none. Raises Refusal, SandboxError.

        They have its spec and its secrets, and cost and age from now on. None of its processes is copied, nor is its command run.
        They come up where it is; those for which there is no room there start elsewhere from an image of that moment.
        """
        await self._boxes.running(project, name)
        if self._records.count("Sandbox", project) + count > self._settings.max_objects:
            message = f"project {project!r} may have {self._settings.max_objects} sandboxes"
            raise Refusal("QuotaExceeded", message, retry_after_s=10, fix="delete some", kind="sandboxes", name=name)
        with self._boxes.reserved(project, name, count):
            async with self._boxes.alone(project, name) as value:
                live = self._up(value)
                names: dict[str, None] = {}
                while len(names) < count:
                    names[self._records.free_name("Sandbox", project, beginning)] = None
                children = [_child(value, name) for name in names]
                with live.in_use():
                    copies = await self._copies(live, children)
                begun = [self._begun(child, copy, live) for child, copy in zip(children, copies, strict=True)]
                stored, done = self._records.put_all("Sandbox", project, begun, answer)
        await self._records.store.durable(done)
        return stored

    async def freeze(self, project: str, name: str, *, frozen: bool) -> Value:
        """Stops everything in it, or lets it go on. Idempotent. Raises Refusal, SandboxError."""
        async with self._boxes.alone(project, name) as value:
            live = self._up(value)
            live.touch()
            if live.sandbox.frozen == frozen:
                return value
            await layer.freeze(live.sandbox, frozen=frozen)
        return await self._records.save("Sandbox", project, self._records.get("Sandbox", project, name) or value)

    async def blocked(self, project: str, name: str) -> list[dict[str, Any]]:
        """What its network policy has refused: now, or in its last run."""
        value = self._boxes.found(project, name)
        live = self._boxes.of(value)
        found: list[dict[str, Any]] = value["status"].get("blocked", [])
        return found if live is None else await layer.blocked(live.sandbox)

    async def _copies(self, live: Live, children: Sequence[Value]) -> list[Sandbox]:
        """A live sandbox for each child, all or none. Raises Refusal (CapacityUnavailable), SandboxError."""
        stay = self._boxes.places.room_beside(live.uid, len(children))
        if stay == len(children):
            return await layer.fork(live.sandbox, stay)
        called, frozen = self._catalog.passing_name(), live.sandbox.frozen
        copies: list[Sandbox] = []
        try:
            # All of them begin with the files of one moment: nothing in the original may run between the copies and the image.
            await layer.freeze(live.sandbox, frozen=True)
            try:
                copies += await layer.fork(live.sandbox, stay) if stay else []
                for child, copy in zip(children, copies, strict=False):
                    # Before the others are on their way: what nobody has a claim to would be ended on its node meanwhile.
                    self._boxes.places.keep_beside(live.uid, child, copy)
                sealed = await layer_images.seal(live.sandbox, called, live.secrets)
            finally:
                if not frozen:
                    await layer.freeze(live.sandbox, frozen=False)
                    await layer.close_secrets(live.sandbox, live.secrets)
            made = await layer_images.collect(live.sandbox, sealed, called, self._settings.folder)
            copies += await self._elsewhere(live, children[stay:], made.digest)
        except BaseException:
            await asyncio.gather(*(copy.terminate.aio() for copy in copies), return_exceptions=True)
            for child in children:
                self._boxes.places.release(child["metadata"]["uid"])
            raise
        finally:
            await self._catalog.pass_name(called)
        return copies

    async def _elsewhere(self, live: Live, children: Sequence[Value], digest: str) -> list[Sandbox]:
        """Sandboxes of an image wherever there is room, all or none."""
        made: dict[str, Sandbox] = {}

        async def make(child: Value) -> None:
            made[child["metadata"]["uid"]] = await self._one_elsewhere(live, child, digest)

        try:
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(make(child))
        except BaseException as error:
            await asyncio.gather(*(sandbox.terminate.aio() for sandbox in made.values()), return_exceptions=True)
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise
        return [made[child["metadata"]["uid"]] for child in children]

    async def _one_elsewhere(self, live: Live, child: Value, digest: str) -> Sandbox:
        given = await self._secrets.given(child)
        made = layer.sandbox_spec(child["spec"], given.env, digest)
        try:
            sandbox = await self._boxes.places.create(child, made, None)
        except SandboxCreateFailed as error:
            message = f"there is no room for all copies: {error.strerror or error}"
            raise Refusal("CapacityUnavailable", message, retry_after_s=5, kind="sandboxes", name=live.name) from error
        try:
            if live.secrets:
                await layer.give_secrets(sandbox, live.secrets)
        except BaseException:
            await sandbox.terminate.aio()
            self._boxes.places.release(child["metadata"]["uid"])
            raise
        return sandbox

    def _begun(self, child: Value, sandbox: Sandbox, live: Live) -> Value:
        return {**child, "status": {**child["status"], **self._boxes.adopt(child, sandbox, live.secrets)}}

    def _up(self, value: Value) -> Live:
        live = self._boxes.of(value)
        if live is None or live.stopping is not None:
            name = value["metadata"]["name"]
            raise Refusal("SandboxNotRunning", f"sandbox {name!r} is not running; start it first", kind="sandboxes", name=name)
        return live


def _child(value: Value, name: str) -> Value:
    meta = value["metadata"]
    child = fresh("Sandbox", name, meta["namespace"], {**value["spec"], "state": "Running"})
    if "labels" in meta:
        child["metadata"]["labels"] = meta["labels"]
    origin = {"name": meta["name"], "uid": meta["uid"]}
    child["status"] = {
        **first_status(child),
        **{key: value["status"][key] for key in _COPIED if key in value["status"]},
        "forkedFrom": origin,
    }
    return child
