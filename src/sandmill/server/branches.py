"""What comes of a live sandbox besides its commands. In: a Sandbox's name. Out: images of it, copies of it, a still sandbox.

Each holds the sandbox's turn, so that nobody stops it half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from sandmill.server import layer, layer_images
from sandmill.server.boxes import Boxes
from sandmill.server.layer_images import Made
from sandmill.server.live import Live
from sandmill.server.node_sandbox import NodeSandbox
from sandmill.server.records import Records, Value, fresh
from sandmill.server.refusals import Refusal
from sandmill.server.settings import Settings
from sandmill.server.statuses import first_status, loss_of
from sandmill.server.tables import Write

_COPIED: Final = ("image", "secretVersions")


class Branches:
    """Snapshots, forks, freezing."""

    def __init__(self, records: Records, boxes: Boxes, settings: Settings) -> None:
        self._records = records
        self._boxes = boxes
        self._settings = settings

    async def snapshot(self, project: str, name: str, called: str) -> Made:
        """An image of its files, `called` so in the store; of a stopped one, what it would start with. Raises Refusal, SandboxError."""
        if (value := self._records.get("Sandbox", project, name)) is not None and value["status"]["phase"] in ("Pending", "Starting"):
            await self._boxes.start(project, name)
        async with self._boxes.alone(project, name) as value:
            live = self._boxes.of(value)
            if live is not None and isinstance(live.sandbox, NodeSandbox):
                message = f"sandbox {name!r} is on a node, and images do not travel yet; fork it there, or stop it and make the image then"
                raise Refusal("Unsupported", message, kind="sandboxes", name=name)
            if live is not None:
                with live.in_use():
                    return await layer_images.snapshot(live.sandbox, called, live.secrets)
            if value["status"]["phase"] == "Failed" or (loss := loss_of(value)) is not None:
                why = value["status"].get("message") if value["status"]["phase"] == "Failed" else loss
                raise Refusal("SandboxNotRunning", f"sandbox {name!r} has no files any more: {why}", kind="sandboxes", name=name)
            pinned = await self._boxes.pinned(value)
            spec = layer.sandbox_spec(value["spec"], {}, None if pinned is None else pinned["digest"])
            return await layer_images.snapshot_of_stopped(spec, self._boxes.kept(value), called)

    async def fork(
        self, project: str, name: str, count: int, beginning: str, answer: Callable[[Sequence[Value]], Write | None]
    ) -> Sequence[Value]:
        """New Sandbox objects, running, that start from its files as they are now: all, or none. Raises Refusal, SandboxError.

        They have its spec and its secrets, and cost and age from now on. None of its processes is copied, nor is its command run.
        """
        await self._boxes.running(project, name)
        if self._records.count("Sandbox", project) + count > self._settings.max_objects:
            message = f"project {project!r} may have {self._settings.max_objects} sandboxes"
            raise Refusal("QuotaExceeded", message, retry_after_s=10, fix="delete some", kind="sandboxes", name=name)
        with self._boxes.reserved(project, name, count):
            async with self._boxes.alone(project, name) as value:
                live = self._up(value)
                with live.in_use():
                    copies = await layer.fork(live.sandbox, count)
                names: dict[str, None] = {}
                while len(names) < count:
                    names[self._records.free_name("Sandbox", project, beginning)] = None
                children = []
                for child_name, copy in zip(names, copies, strict=True):
                    child = _child(value, child_name)
                    children.append({**child, "status": {**child["status"], **self._boxes.adopt(child, copy, live.secrets)}})
                stored, done = self._records.put_all("Sandbox", project, children, answer)
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
