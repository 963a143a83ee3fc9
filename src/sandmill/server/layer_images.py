"""The other half of `layer.py`: images. In: sandboxes, Dockerfiles, names. Out: images in the store, under names of the server's own.

A secret that a sandbox was given is in no image of it: it is taken out while the sandbox stands still, and put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Set
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from sandmill.errors import SandboxError
from sandmill.sandboxes import Egress, Image, Sandbox, SandboxSpec
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images import HOST, Use, store
from sandmill.sandboxes.images.build import Limits, Scope, build
from sandmill.sandboxes.images.dockerfile import parse
from sandmill.sandboxes.images.image import architecture
from sandmill.server import layer
from sandmill.server.node_sandbox import NodeSandbox
from sandmill.server.specs import PUBLIC

BUILD_S: Final = 1800.0
"""One step of a build may take so long."""
_DIGEST: Final = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")
_log = logging.getLogger("sandmill.server")


class Made(NamedTuple):
    """An image that was made, as its object's status tells it."""

    digest: str
    size_bytes: int | None
    config: dict[str, Any]


class Sealed(NamedTuple):
    """A sandbox's files as an image; `there`: what that is called on the sandbox's node, None when it is in this machine's store."""

    image: Image
    there: str | None


def platform() -> str:
    """This machine's."""
    return f"linux/{architecture()}"


def public_images() -> dict[str, str]:
    """Digests by the names of the store that everybody may use."""
    return {name: digest for name, digest in store().names().items() if name.startswith(PUBLIC)}


def is_public_digest(word: str) -> bool:
    """Whether it is the digest of one of them, or the beginning of one."""
    digits = digest_of(word)
    return digits is not None and any(digest.removeprefix("sha256:").startswith(digits) for digest in public_images().values())


def is_stored(word: str) -> bool:
    """Whether it is the whole digest of an image in the store."""
    return word in store().digests()


def digest_of(word: str) -> str | None:
    """The digits of what is a digest, or the beginning of one."""
    match = _DIGEST.fullmatch(word)
    return None if match is None else match[1]


def public_image(wanted: str) -> Image:
    """One of them, by name or digest. Raises ImageError."""
    return store().find(wanted)


def user_of(digest: str | None) -> str | None:
    """Whom the commands of an image run as, for USER; None where builds have one user only. Raises ImageError."""
    account = (HOST if digest is None else store().find(digest)).account
    return None if os.geteuid() else f"{account.name}:{account.gid}"


def name_image(digest: str, name: str) -> None:
    """Keeps an image. Blocks. Raises ImageError when it is gone."""
    image = store().find(digest)
    use = store().use(image)
    try:
        store().save(image, name)
    finally:
        use.release()


def names_below(prefix: str) -> Set[str]:
    """Names of the store that begin so. Blocks."""
    return {name for name in store().names() if name.startswith(prefix)}


def drop_names(names: Set[str], *, linger: bool = False) -> None:
    """Lets images go, their layers with them unless a live sandbox uses these; those that `linger` when room is needed. Blocks."""
    for name in names:
        (store().unname if linger else store().drop)(name)


def tidy() -> None:
    """Removes what a killed server left half-made. Blocks."""
    store().collect()


async def snapshot(sandbox: Sandbox, name: str, secrets: Mapping[str, bytes], folder: Path) -> Made:
    """All files of a live sandbox but its secrets; `folder` is for what comes from a node. Raises SandboxError, Refusal."""
    return await collect(sandbox, await seal(sandbox, name, secrets), name, folder)


async def seal(sandbox: Sandbox, name: str, secrets: Mapping[str, bytes]) -> Sealed:
    """The first half of a snapshot: from here on the sandbox may change its files again. Raises SandboxError."""
    async with _without(sandbox, secrets):
        if isinstance(sandbox, NodeSandbox):
            return Sealed(*await sandbox.picture())
        return Sealed(await sandbox.snapshot_filesystem.aio(name), None)


async def collect(sandbox: Sandbox, sealed: Sealed, name: str, folder: Path) -> Made:
    """The second half: the image is in this machine's store, under its name. Raises SandboxError, Refusal."""
    image = sealed.image
    if isinstance(sandbox, NodeSandbox) and sealed.there is not None:
        try:
            image = await sandbox.brought(image.digest, name, folder)
        finally:
            await asyncio.shield(sandbox.forget_picture(sealed.there))
    return await in_thread(lambda: made_of(image))


async def snapshot_of_stopped(spec: SandboxSpec, kept: Path | None, name: str, folder: Path) -> Made:
    """What a stopped sandbox would have at its next start. Raises SandboxError, OSError, TimeoutError."""
    async with await layer.create(spec, "snapshot", {}) as sandbox:
        if kept is not None:
            await layer.restore(sandbox, kept)
        return await snapshot(sandbox, name, {}, folder)


def check_dockerfile(text: str) -> None:
    """Raises ConfigError with the line."""
    parse(text)


async def build_image(
    text: str,
    context: Path,
    *,
    name: str,
    project: str,
    build_args: Mapping[str, str],
    network: Egress,
    find: Callable[[str], str | None],
    report: Callable[[str], None],
) -> Made:
    """Builds a Dockerfile whose FROM means what `find` says: a digest, None for this machine's programs. Raises ConfigError, SandboxError.

    `find` raises ImageError.
    """

    def hold(digest: str | None) -> tuple[Image, Use]:
        image = HOST if digest is None else store().find(digest)
        return image, store().use(image)

    async def held(wanted: str) -> tuple[Image, Use]:
        digest = find(wanted)
        return await in_thread(lambda: hold(digest), lambda pair: pair[1].release())

    limits = Limits(timeout_s=BUILD_S, network=network)
    image = await build(
        # A text of one line would be taken for a path.
        text + "\n", context, name=name, build_args=build_args, limits=limits, report=report, scope=Scope(held, f"project {project}")
    )  # fmt: skip
    return await in_thread(lambda: made_of(image))


def made_of(image: Image) -> Made:
    """Its account. Blocks."""
    records = [store().record(one) for one in image.layers]
    size = None if None in records else sum(record.bytes for record in records if record is not None)
    digest, config = described(image)
    return Made(digest, size, config)


def described(image: Image) -> tuple[str, dict[str, Any]]:
    """Its digest, and all that this is a digest of."""
    return image.digest, msgspec.to_builtins(image)


@contextlib.asynccontextmanager
async def _without(sandbox: Sandbox, secrets: Mapping[str, bytes]) -> AsyncIterator[None]:
    """The sandbox stands still and has no secrets. What ran sees them again afterwards."""
    if not secrets:
        yield
        return
    frozen = sandbox.frozen
    await sandbox.freeze.aio()
    try:
        await layer.take_secrets(sandbox, secrets)
        yield
    finally:
        try:
            await layer.put_secrets(sandbox, secrets)
            if not frozen:
                await sandbox.thaw.aio()
                await layer.close_secrets(sandbox, secrets)
        except SandboxError as error:
            _log.warning("sandbox %s may have lost its secrets: %s", sandbox.name, error)
