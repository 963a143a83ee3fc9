"""The environment controller. In: Environment objects and the blobs that they name. Out: each Ready with its sizes, or Failed with why.

    <state>/environments/<uid>/bundle.tar.gz    an object's own copy: blobs that nobody asks for make room, environments do not

Nothing else is kept: an object that is Pending when the server dies is taken up where it was by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Final

from sandmill.errors import SandmillError
from sandmill.sandboxes.dual import in_thread
from sandmill.server.background import Background
from sandmill.server.blobs import Blobs
from sandmill.server.events import Events
from sandmill.server.layer_environments import BUNDLE, Measured, NotUsable, forget_package, measure, section_of
from sandmill.server.records import Records, Value
from sandmill.server.refusals import Cause, Refusal, invalid, shown_name
from sandmill.server.schema import UNSUPPORTED, ascii_of, nearest
from sandmill.server.settings import Settings
from sandmill.server.statuses import condition

ENDED: Final = ("Ready", "Failed")
CATALOG: Final = "nodus"
"""The project whose environments everybody may refer to, as nodus/NAME@VERSION."""
_AT_ONCE: Final = 2
_TRIES: Final = 3
_AGAIN_S: Final = 1.0
_log = logging.getLogger("sandmill.server")


class Environments:
    """All environments of the server. On the event loop only."""

    def __init__(self, records: Records, events: Events, blobs: Blobs, settings: Settings) -> None:
        self._records = records
        self._events = events
        self._blobs = blobs
        self._folder = settings.folder / "environments"
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._work = Background()

    def admit(self, project: str, spec: Value) -> None:
        """Whether such an environment can be had here. Raises Refusal."""
        source = spec["package"].get("source")
        if source is None:
            message = "give a bundle that was uploaded: source: {blob: sha256:<hex>, module: NAME}"
            raise invalid("environments", "", [Cause("spec.package.source", "FieldValueRequired", message)])
        causes = []
        module, dot, _ = source["module"].replace(":", ".").partition(".")
        if dot:
            message = f"a module at the top of the bundle, with tasks and reward in it; write {module} and put both there"
            causes.append(Cause("spec.package.source.module", UNSUPPORTED, message))
        for place, grader in enumerate(spec.get("graders", ())):
            if grader["kind"] != "Program":
                causes.append(Cause(f"spec.graders[{place}].kind", UNSUPPORTED, "the module's reward grades, which is a Program"))
        if causes:
            said = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
            raise Refusal(UNSUPPORTED, said, causes=causes, kind="environments")
        self._blobs.find(project, source["blob"], "spec.package.source.blob")

    def find(self, project: str, reference: str, field: str) -> Value:
        """The object that `name@version`, or nodus/name@version, means. Raises Refusal (Invalid) with the nearest one."""
        owner, _, rest = reference.rpartition("/")
        name, _, version = rest.partition("@")
        found = None if owner not in ("", CATALOG) else self._records.get("Environment", owner or project, name)
        if found is None or found["spec"]["version"] != version:
            known = [f"{one['metadata']['name']}@{one['spec']['version']}" for one in self._records.list("Environment", project)]
            known += [f"{CATALOG}/{one['metadata']['name']}@{one['spec']['version']}" for one in self._records.list("Environment", CATALOG)]
            near = f"; write {name}@{found['spec']['version']}" if found is not None else nearest(reference, known)
            message = f"there is no environment {shown_name(reference)}{near}"
            raise invalid("trainingjobs", "", [Cause(field, "FieldValueNotFound", message)])
        return found

    def has(self, project: str, reference: str) -> bool:
        """Whether a reference means something."""
        try:
            self.find(project, reference, "")
        except Refusal:
            return False
        return True

    def bundle(self, value: Value) -> Path:
        """Where an object's own copy of its bundle lies."""
        return self._folder / str(value["metadata"]["uid"]) / BUNDLE

    def soon(self, value: Value) -> None:
        """Loads and measures it in the background; how it went is in its object."""
        self._work.start(value["metadata"]["uid"], self._take(value), lambda error: self._over(value, error))

    async def forget(self, value: Value) -> None:
        """An object was removed: what was made for it goes. Jobs that train on it have a copy of their own."""
        await self._work.stop(value["metadata"]["uid"])
        bundle = self.bundle(value)
        alike = any(other["spec"]["package"] == value["spec"]["package"] for other in self._records.each("Environment"))

        def free() -> None:
            if not alike:
                with contextlib.suppress(SandmillError, OSError):  # it was none
                    forget_package(section_of(bundle, value["spec"]))
            shutil.rmtree(bundle.parent, ignore_errors=True)

        await in_thread(free)

    def recover(self) -> None:
        """After a restart: goes on with what is not measured yet; what belongs to no object goes."""
        known = set()
        for value in self._records.each("Environment"):
            known.add(value["metadata"]["uid"])
            if value["status"]["phase"] not in ENDED:
                self.soon(value)
        for left in self._folder.glob("*"):
            if left.name not in known:
                shutil.rmtree(left, ignore_errors=True)

    async def close(self) -> None:
        """Measures nothing more; what is not done is Pending still."""
        await self._work.close()

    async def _take(self, value: Value) -> None:
        try:
            async with self._room:
                await in_thread(lambda: self._keep(value))
                found = await self._measured(value)
        except NotUsable as error:
            self._failed(value, error.reason, ascii_of(str(error)))
        except Refusal as refusal:
            self._failed(value, "BundleMissing", refusal.message)
        except (SandmillError, OSError, TimeoutError) as error:
            self._failed(
                value, "InfrastructureFailed", ascii_of(f"{error or type(error).__name__}; nothing is wrong with it: create it again")
            )
        else:
            said = f"{found.train} train and {found.test} test tasks"
            status = {
                "phase": "Ready",
                "splits": {"train": found.train, "test": found.test},
                "digest": found.digest,
                "image": found.image,
                "conditions": [condition("Ready", "True", "Ready", said), condition("Verified", "True", "Loaded", "its reward was called")],
            }
            self._put(value, status)

    def _keep(self, value: Value) -> None:
        """A copy that stays. Blocks. Raises Refusal for a blob that is gone."""
        target = self.bundle(value)
        source = self._blobs.find(value["metadata"]["namespace"], value["spec"]["package"]["source"]["blob"], "spec.package.source.blob")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = target.with_name(".new")
        fresh.unlink(missing_ok=True)
        try:
            os.link(source, fresh)
        except OSError:
            shutil.copyfile(source, fresh)
        os.replace(fresh, target)

    async def _measured(self, value: Value) -> Measured:
        """Tried again where the machine, not the bundle, was the reason."""
        for left in range(_TRIES - 1, -1, -1):
            try:
                return await measure(self.bundle(value), value["spec"])
            except (SandmillError, OSError) as error:
                if not left:
                    raise
                _log.warning("environment %s could not be loaded, and is tried again: %s", value["metadata"]["name"], error)
                await asyncio.sleep(_AGAIN_S)
        raise AssertionError

    def _failed(self, value: Value, reason: str, message: str) -> None:
        self._events.note(value, reason, message, warning=True)
        conditions = [condition("Ready", "False", reason, message)]
        self._put(value, {"phase": "Failed", "reason": reason, "message": message, "conditions": conditions})

    def _put(self, value: Value, status: Value) -> None:
        meta = value["metadata"]
        stored = self._records.get("Environment", meta["namespace"], meta["name"])
        if stored is not None and (stored["metadata"]["uid"], stored["spec"]["version"]) == (meta["uid"], value["spec"]["version"]):
            status = {**status, "observedGeneration": stored["metadata"].get("generation", 1)}
            self._records.put("Environment", meta["namespace"], {**stored, "status": status})

    def _over(self, value: Value, error: BaseException | None) -> None:
        if error is not None:
            _log.error("an environment could not be loaded", exc_info=error)
            self._failed(value, "InternalError", "the server made a mistake; its log says where")
