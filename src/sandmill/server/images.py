"""The image controller. In: Image objects. Out: images in the store, made one step after the other; each object says how far it is.

A snapshot holds its sandbox's turn, so that nobody stops it half-way. Builds wait for one another: each may fill a core.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from sandmill.errors import ConfigError, ImageError, SandmillError
from sandmill.sandboxes.dual import in_thread
from sandmill.server import layer, layer_images
from sandmill.server.blobs import Blobs
from sandmill.server.branches import Branches
from sandmill.server.catalog import ENDED, Catalog
from sandmill.server.events import Events
from sandmill.server.layer_images import Made
from sandmill.server.outputs import Log, Outputs
from sandmill.server.recipes import dockerfile_of, text_in, unpack, unpack_part
from sandmill.server.records import Records, Value, fine_stamp, seconds_of
from sandmill.server.refusals import Cause, Refusal, invalid
from sandmill.server.schema import ascii_of, nearest
from sandmill.server.settings import Settings
from sandmill.server.specs import DEFAULT_IMAGE
from sandmill.server.statuses import condition
from sandmill.server.tables import Forget

_BUILDS_AT_ONCE: Final = 2
_END_S: Final = 10.0
_WAYS: Final = ("fromSandbox", "dockerfile", "base")
_log = logging.getLogger("sandmill.server")


class Images:
    """All images that are being made."""

    def __init__(
        self, records: Records, events: Events, catalog: Catalog, branches: Branches, blobs: Blobs, outputs: Outputs, settings: Settings
    ) -> None:
        self._records = records
        self._events = events
        self._catalog = catalog
        self._branches = branches
        self._blobs = blobs
        self._outputs = outputs
        self._contexts = settings.folder / "contexts"
        self._room = asyncio.Semaphore(_BUILDS_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By the Image object's uid."""

    def admit(self, project: str, spec: Value) -> None:
        """Whether such an image can be made. Raises Refusal."""
        given = [way for way in _WAYS if way in spec]
        if len(given) != 1:
            message = f"give one of {', '.join(_WAYS)}, found {' and '.join(given) or 'none'}"
            raise invalid("images", "", [Cause(f"spec.{given[1] if given else 'base'}", "FieldValueInvalid", message)])
        if spec.get("platform", layer_images.platform()) != layer_images.platform():
            message = f"this machine makes images for {layer_images.platform()} only"
            raise invalid("images", "", [Cause("spec.platform", "FieldValueNotSupported", message)])
        layer.check_egress(spec["network"]["egress"])
        if "steps" in spec and "base" not in spec:
            raise invalid("images", "", [Cause("spec.steps", "FieldValueInvalid", "steps need a base; a Dockerfile has its own")])
        if "fromSandbox" in spec:
            self._admit_snapshot(project, spec["fromSandbox"]["name"])
        elif "dockerfile" in spec:
            self._admit_dockerfile(project, spec["dockerfile"])
        else:
            self._admit_base(project, spec)

    def soon(self, value: Value) -> None:
        """Makes an image in the background; how it went is in its object."""
        meta = value["metadata"]
        log = self._outputs.begin(meta["uid"])
        task = asyncio.get_running_loop().create_task(self._make(value, log))
        self._tasks[meta["uid"]] = task
        task.add_done_callback(lambda done: self._over(value, log, done))

    async def forget(self, value: Value) -> None:
        """An Image object was removed: what is not made yet is not made, and its layers go."""
        uid = value["metadata"]["uid"]
        if (task := self._tasks.get(uid)) is not None:
            task.cancel()
            await asyncio.wait([task], timeout=_END_S)
        self._outputs.forget(uid)
        await self._catalog.sweep()

    async def discard(self, older_than_s: float) -> None:
        """At a node: a head that was killed while it fetched an image never says that it need not be kept."""
        for value in list(self._records.each("Image")):
            meta = value["metadata"]
            if time.time() - seconds_of(meta["creationTimestamp"]) >= older_than_s:
                self._records.remove("Image", meta["namespace"], meta["name"], Forget(meta["uid"]))
                await self.forget(value)

    def recover(self) -> None:
        """After a restart: what was being made is not there."""
        shutil.rmtree(self._contexts, ignore_errors=True)
        for value in self._records.each("Image"):
            if value["status"]["phase"] not in ENDED:
                self._put(value, phase="Failed", reason="Interrupted", message="the server ended while it was made; create it again")

    async def close(self) -> None:
        """Makes nothing more."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=_END_S)

    def _admit_snapshot(self, project: str, name: str) -> None:
        if self._records.get("Sandbox", project, name) is None:
            known = [value["metadata"]["name"] for value in self._records.list("Sandbox", project)]
            message = f"there is no sandbox {name!r}{nearest(name, known)}"
            raise invalid("images", "", [Cause("spec.fromSandbox.name", "FieldValueNotFound", message)])

    def _admit_dockerfile(self, project: str, asked: Value) -> None:
        if ("inline" in asked) == ("blob" in asked):
            raise invalid("images", "", [Cause("spec.dockerfile.inline", "FieldValueInvalid", "give the text, or the blob that has it")])
        for key in ("blob", "context"):
            if key in asked:
                self._blobs.find(project, asked[key], f"spec.dockerfile.{key}")
        if "inline" in asked:
            try:
                layer_images.check_dockerfile(asked["inline"])
            except ConfigError as error:
                raise invalid("images", "", [Cause("spec.dockerfile.inline", "FieldValueInvalid", ascii_of(str(error)))]) from error

    def _admit_base(self, project: str, spec: Value) -> None:
        self._catalog.choose(project, spec["base"], "spec.base")
        for place, step in enumerate(spec.get("steps", ())):
            if len(step) != 1:
                raise invalid(
                    "images", "", [Cause(f"spec.steps[{place}]", "FieldValueInvalid", "a step is one of run, env, workdir, copy")]
                )
            if "copy" in step:
                self._blobs.find(project, step["copy"]["blob"], f"spec.steps[{place}].copy.blob")

    async def _make(self, value: Value, log: Log) -> None:
        began_s = time.time()
        self._put(value, phase="Building", progress={"stage": "Building"}, build={"startTime": fine_stamp(began_s)})
        try:
            if "fromSandbox" in value["spec"]:
                made = await self._snapshot(value)
            else:
                async with self._room:
                    made = await self._build(value, log)
        except (SandmillError, Refusal, OSError, TimeoutError) as error:
            message = ascii_of(str(error) or type(error).__name__)
            self._outputs.add(log, "stdout", f"{message}\n".encode())
            self._failed(value, log, message)
        else:
            self._ready(value, log, made, began_s)

    async def _snapshot(self, value: Value) -> Made:
        meta = value["metadata"]
        return await self._branches.snapshot(meta["namespace"], value["spec"]["fromSandbox"]["name"], self._catalog.hold_name(meta["uid"]))

    async def _build(self, value: Value, log: Log) -> Made:
        spec, meta = value["spec"], value["metadata"]
        self._contexts.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._contexts))
        try:
            user = None if "base" not in spec else layer_images.user_of(self._from(meta["namespace"], spec["base"]))
            text, context = await in_thread(lambda: self._recipe(spec, meta["namespace"], user, folder))
            return await layer_images.build_image(
                text,
                context,
                name=self._catalog.hold_name(meta["uid"]),
                project=meta["namespace"],
                build_args=spec.get("dockerfile", {}).get("buildArgs", {}),
                network=layer.egress(spec["network"]["egress"]),
                find=lambda wanted: self._from(meta["namespace"], wanted),
                report=lambda line: self._outputs.add(log, "stdout", f"{line}\n".encode()),
            )
        finally:
            await in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))

    def _recipe(self, spec: Value, project: str, user: str | None, folder: Path) -> tuple[str, Path]:
        """The Dockerfile and its context. Blocks. Raises ConfigError, Refusal."""
        context = folder / "context"
        if "dockerfile" not in spec:
            context.mkdir()
            copies = [step["copy"] for step in spec.get("steps", ()) if "copy" in step]
            parts = []
            for number, copy in enumerate(copies):
                part = context / str(number)
                parts.append((part, unpack_part(self._blobs.find(project, copy["blob"], "spec.steps"), part, copy["dest"])))
            return dockerfile_of(spec.get("steps", ()), spec["base"], user, parts), context
        asked = spec["dockerfile"]
        if "context" in asked:
            unpack(self._blobs.find(project, asked["context"], "spec.dockerfile.context"), context)
        else:
            context.mkdir()
        if "inline" in asked:
            return asked["inline"], context
        return text_in(self._blobs.find(project, asked["blob"], "spec.dockerfile.blob")), context

    def _from(self, project: str, wanted: str) -> str | None:
        """The digest that a FROM means, None for this machine's own programs. Raises ImageError."""
        if wanted in (DEFAULT_IMAGE, "host"):
            return None
        try:
            image = self._catalog.choose(project, wanted, "spec.base")
        except Refusal as refusal:
            raise ImageError(refusal.message) from refusal
        if image is None:
            return layer_images.public_image(wanted).digest
        if image["status"]["phase"] != "Ready":
            raise ImageError(f"image {wanted[:200]!a} is not made yet; wait until it is Ready")
        return str(image["status"]["digest"])

    def _ready(self, value: Value, log: Log, made: Made, began_s: float) -> None:
        status: dict[str, Any] = {
            "phase": "Ready",
            "digest": made.digest,
            "config": made.config,
            "tags": dict.fromkeys(value["spec"].get("tags", ()), made.digest),
            "build": {"startTime": fine_stamp(began_s), "completionTime": fine_stamp(time.time())},
            "conditions": [condition("Ready", "True", "Ready", "sandboxes can start from it")],
        }
        if made.size_bytes is not None:
            status["size"] = made.size_bytes
        if "python" in value["spec"]:
            status["python"] = value["spec"]["python"]
        self._end(value, log, status)

    def _failed(self, value: Value, log: Log, message: str) -> None:
        reason = "SnapshotFailed" if "fromSandbox" in value["spec"] else "BuildFailed"
        self._events.note(value, reason, message, warning=True)
        _log.warning("image %s could not be made: %s", value["metadata"]["name"], message)
        conditions = [condition("Ready", "False", reason, message)]
        self._end(value, log, {"phase": "Failed", "reason": reason, "message": message, "conditions": conditions})

    def _end(self, value: Value, log: Log, status: dict[str, Any]) -> None:
        meta = value["metadata"]
        stored = self._records.get("Image", meta["namespace"], meta["name"])
        if stored is not None and stored["metadata"]["uid"] == meta["uid"]:
            self._records.put("Image", meta["namespace"], {**stored, "status": status}, *self._outputs.rest(log))

    def _put(self, value: Value, **status: Any) -> None:
        meta = value["metadata"]
        stored = self._records.get("Image", meta["namespace"], meta["name"])
        if stored is not None and stored["metadata"]["uid"] == meta["uid"]:
            self._records.put("Image", meta["namespace"], {**stored, "status": {**stored["status"], **status}})

    def _over(self, value: Value, log: Log, task: asyncio.Task[None]) -> None:
        self._tasks.pop(value["metadata"]["uid"], None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an image could not be made", exc_info=error)
            self._failed(value, log, "the server made a mistake; its log says where")
