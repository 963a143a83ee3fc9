"""What sandboxes start from: images, their store, and how they come to be. In: names, archives, Dockerfiles. Out: `Image`."""

from __future__ import annotations

import msgspec

from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images.image import HOST, Image
from sandmill.sandboxes.images.store import Store, Stored, Use, store
from sandmill.sandboxes.spec import DEFAULT_WORKDIR, SandboxSpec

__all__ = ["HOST", "Image", "Store", "Stored", "Use", "resolve", "settle", "store"]


async def resolve(spec: SandboxSpec) -> tuple[SandboxSpec, Image, Use | None]:
    """A spec's image, pinned, and the spec with what the image leaves to say. Raises ImageError."""
    wanted = spec.image
    if wanted is None:
        return spec, HOST, None
    from sandmill.sandboxes.images.importing import obtain  # reading archives: nothing that a sandbox without an image should wait for

    image, use = await in_thread(lambda: obtain(wanted, store()), lambda pair: pair[1].release())
    return settle(spec, image), image, use


def settle(spec: SandboxSpec, image: Image) -> SandboxSpec:
    """The spec of a sandbox that starts from `image`: what the caller said wins over what the image says."""
    return msgspec.structs.replace(
        spec, image=image.digest, env={**image.env, **spec.env}, workdir=spec.workdir or image.workdir or DEFAULT_WORKDIR
    )
