"""Which image a word means to a project. In: `spec.image`, a FROM. Out: digests, held in the image store while an object needs them.

A word is the name, a tag or the digest of one of the project's own Image objects, or the name of a store image under nodus/, which the
machine's owner made for everybody. Other projects' images are not there.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, Final

from sandmill.errors import ImageError
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images.store import SERVED
from sandmill.server import layer_images as layer
from sandmill.server.records import Records, Value
from sandmill.server.refusals import Cause, Refusal, shown_name
from sandmill.server.schema import nearest
from sandmill.server.specs import DEFAULT_IMAGE, PUBLIC, WORKSPACE

ENDED: Final = ("Ready", "Failed")
_LONGEST_BUILD_S: Final = 3600.0
_LOOK_S: Final = 5.0


class Catalog:
    """The images of all projects. On the event loop only."""

    def __init__(self, records: Records, owner: str, *, at_node: bool = False) -> None:
        self._records = records
        self._at_node = at_node
        """Its head chooses, and names what it chose by digest. What no object needs any more stays as long as there is room for it."""
        self._owner = owner
        """Tells this server's names in the store from another one's."""
        self._holding = asyncio.Lock()
        """An image of everybody is not let go between a sandbox that no longer needs it and the next one that does."""

    def hold_name(self, hold: str) -> str:
        """What an object's image is called in the store."""
        return f"{SERVED}{self._owner}/{hold}"

    def passing_name(self) -> str:
        """What an image is called that no object needs, until `pass_name`; or the next start, should this server be killed."""
        return f"{SERVED}{self._owner}.passing/{secrets.token_hex(8)}"

    async def pass_name(self, name: str) -> None:
        """Lets go of an image that was called so. Idempotent."""
        await in_thread(lambda: layer.drop_names({name}))

    def object_of(self, project: str, wanted: str) -> Value | None:
        """The Image object that a word means: by name, by tag the newest, by digest or the first twelve digits of one at least."""
        if (named := self._records.get("Image", project, wanted)) is not None:
            return named
        images = self._records.list("Image", project)
        tagged = [image for image in images if wanted in image["spec"].get("tags", ())]
        if tagged:
            return max(
                tagged, key=lambda image: (image["status"]["phase"] == "Ready", _made(image), image["metadata"]["creationTimestamp"])
            )
        if (digits := layer.digest_of(wanted)) is not None:
            return next((image for image in images if _digest(image).removeprefix("sha256:").startswith(digits)), None)
        return None

    def choose(self, project: str, wanted: str, field: str) -> Value | None:
        """The Image object, None for an image of everybody. Raises Refusal (ImageNotFound) naming the nearest, or why it failed."""
        if wanted == DEFAULT_IMAGE:
            return None
        found = None
        if wanted.startswith(PUBLIC):
            if wanted in layer.public_images():
                return None
        elif (found := self.object_of(project, wanted)) is not None and found["status"]["phase"] != "Failed":
            return found
        elif found is None and (layer.is_public_digest(wanted) or (self._at_node and layer.is_stored(wanted))):
            return None
        message = f"there is no image {shown_name(wanted)} in project {project!r}{nearest(wanted, self._known(project))}"
        if found is not None:
            message = f"image {shown_name(wanted)} could not be made: {found['status'].get('message')}"
        raise Refusal("ImageNotFound", message, causes=[Cause(field, "FieldValueNotFound", message)])

    def complete(self, project: str, spec: Value, existing: Value | None) -> Value:
        """A Sandbox's spec with the working folder that its image says, where the caller says none; that of the `existing` one of its name.

        Raises Refusal (ImageNotFound).
        """
        if existing is not None:
            return {"workingDir": existing["spec"]["workingDir"], **spec}
        image = self.choose(project, spec["image"], "spec.image")
        if "workingDir" in spec:
            return spec
        if image is not None:
            workdir = image["status"].get("config", {}).get("workdir")
        else:
            workdir = None if spec["image"] == DEFAULT_IMAGE else layer.public_image(spec["image"]).workdir
        return {**spec, "workingDir": workdir or WORKSPACE}

    async def await_image(self, value: Value) -> None:
        """Until the image that a Sandbox starts from is made, or cannot be; not while holding the sandbox's turn."""
        wanted, project = value["spec"]["image"], value["metadata"]["namespace"]
        if wanted != DEFAULT_IMAGE and "image" not in value["status"] and (image := self.object_of(project, wanted)) is not None:
            await self.until_ended(image, _LONGEST_BUILD_S)

    def pin(self, value: Value) -> dict[str, Any] | None:
        """`status.image` of a Sandbox: the same image at each start. None is the built-in one, or one that is not made yet.

        The caller stores it before `hold`. Raises Refusal (ImageNotFound).
        """
        project, wanted = value["metadata"]["namespace"], value["spec"]["image"]
        if wanted == DEFAULT_IMAGE:
            return None
        if (pinned := value["status"].get("image")) is not None:
            return dict(pinned)
        image = self.choose(project, wanted, "spec.image")
        if image is None:
            digest, config = layer.described(layer.public_image(wanted))
            hold = f"{PUBLIC}{digest.removeprefix('sha256:')[:32]}"
            return {"reference": wanted, "digest": digest, "config": config, "hold": hold}
        status = image["status"]
        if status["phase"] != "Ready":
            return None
        return {"reference": wanted, "digest": status["digest"], "config": status["config"], "hold": image["metadata"]["uid"]}

    async def hold(self, pinned: Value) -> None:
        """Keeps an image of everybody for as long as a Sandbox object names it; a project's own ones are kept as they are made."""
        if not pinned["hold"].startswith(PUBLIC):
            return
        try:
            async with self._holding:
                await in_thread(lambda: layer.name_image(pinned["digest"], self.hold_name(pinned["hold"])))
        except ImageError as error:
            raise Refusal("ImageNotFound", f"image {pinned['reference']!a} is gone: {error}") from error

    async def until_ended(self, image: Value, wait_s: float) -> Value | None:
        """The Image object once it is Ready or Failed, or as it is after `wait_s` seconds; None once it is deleted."""
        meta, ends = image["metadata"], time.monotonic() + wait_s
        watch = self._records.watch("Image", meta["namespace"], None)
        try:
            while True:
                now = self._records.get("Image", meta["namespace"], meta["name"])
                if now is None or now["metadata"]["uid"] != meta["uid"]:
                    return None
                left = ends - time.monotonic()
                if now["status"]["phase"] in ENDED or left <= 0:
                    return now
                await watch.next(min(left, _LOOK_S))
        finally:
            self._records.unwatch(watch)

    async def recover(self) -> None:
        """After a restart: lets go of what no object needs, and of what was half-made."""
        await self.sweep()
        await in_thread(lambda: layer.drop_names(layer.names_below(f"{SERVED}{self._owner}.passing/")))
        await in_thread(layer.tidy)

    async def release(self, pinned: Value) -> None:
        """A Sandbox object that named an image was removed. Looks no further than at the next object that names it too."""
        hold = pinned["hold"]
        if any(image["metadata"]["uid"] == hold for image in self._records.each("Image")):
            return
        if not any(box["status"].get("image", {}).get("hold") == hold for box in self._records.each("Sandbox")):
            await self.sweep()

    async def sweep(self) -> None:
        """Lets go of the images that no object needs any more. What is made meanwhile is not among those looked at."""
        async with self._holding:
            there = await in_thread(lambda: layer.names_below(self.hold_name("")))
            needed = {image["metadata"]["uid"] for image in self._records.each("Image")}
            needed |= {box["status"]["image"]["hold"] for box in self._records.each("Sandbox") if "image" in box["status"]}
            gone = there - {self.hold_name(hold) for hold in needed}
            if gone:
                await in_thread(lambda: layer.drop_names(gone, linger=self._at_node))

    def _known(self, project: str) -> list[str]:
        images = self._records.list("Image", project)
        tags = [tag for image in images for tag in image["spec"].get("tags", ())]
        return [DEFAULT_IMAGE, *sorted(layer.public_images()), *(image["metadata"]["name"] for image in images), *tags]


def _digest(image: Value) -> str:
    return str(image["status"].get("digest", ""))


def _made(image: Value) -> str:
    return str(image["status"].get("build", {}).get("completionTime", ""))
