"""What a sandbox starts from. In: layers and a configuration. Out: a frozen record named by the digest of its own contents.

An image's layers lie in the store (store.py), one folder each, shared by every sandbox that uses them.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import ImageError
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.node import USER_UID, Base
from sandmill.sandboxes.dual import dual_class, in_thread
from sandmill.sandboxes.spec import Egress

MOST_LAYERS: Final = 100
"""An overlay's option names every layer and has to fit a page."""
_NAME_DIGITS: Final = 32
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """This machine's, in the words of image configurations."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def folder_name(layer: str) -> str:
    """The name of a layer's folder: the start of its digest."""
    return layer.removeprefix("sha256:")[:_NAME_DIGITS]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Who an image's commands run as, unless a caller says otherwise."""

    name: str = "user"
    uid: int = USER_UID
    gid: int = USER_UID
    home: str = "/home/user"


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image in the store. Use it as `Sandbox.create(image=...)`, itself or by name or digest."""

    layers: tuple[str, ...] = ()
    """Digests, the lowest first."""
    on_host: bool = True
    """The layers lie above this machine's own programs, as in a sandbox without an image."""
    env: Mapping[str, str] = {}
    workdir: str = ""
    """Empty: /workspace."""
    account: Account = Account()
    architecture: str = ""
    version: int = 1

    @property
    def digest(self) -> str:
        """`sha256:...` of everything above."""
        return "sha256:" + hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    @property
    def base(self) -> Base:
        """What the warden is told."""
        return Base(
            tuple(folder_name(layer) for layer in reversed(self.layers)), self.on_host, wire.identity(self.account.uid, self.account.gid)
        )

    @dual_class
    async def build(
        cls: type[Image],  # noqa: N805 - a class comes first here
        dockerfile: str | Path,
        context: str | Path = ".",
        *,
        name: str | None = None,
        build_args: Mapping[str, str] | None = None,
        network: Egress | None = None,
        cpu: float | str = 1,
        memory: int | str = "2Gi",
        disk: int | str = "2Gi",
        timeout: float = 1800.0,
        report: Callable[[str], None] | None = None,
    ) -> Image:
        """Builds an image from a Dockerfile (a path, or the text itself) and the files of `context`; `name` then means it.

        FROM, COPY, ENV, WORKDIR, RUN, USER and ARG; each step runs in a sandbox with these limits and, unless `network` is given, without
        a network. `report` gets a line per step. Raises ConfigError with file and line, ImageError, SandboxError.
        """
        from sandmill.sandboxes.images.build import Limits, build

        limits = Limits(cpu=cpu, memory=memory, disk=disk, timeout_s=timeout, network=network or Egress())
        return await build(
            dockerfile, Path(context), name=name, build_args=build_args or {}, limits=limits, report=report or (lambda line: None)
        )

    @dual_class
    async def load(cls: type[Image], reference: str, *, name: str | None = None) -> Image:  # noqa: N805 - a class comes first here
        """The image that `reference` means: a name or digest in the store, `oci:PATH[:TAG]` or `docker-archive:PATH[:NAME]`, which is
        unpacked into the store unless it is there. `name` then means it. Raises ImageError.
        """
        from sandmill.sandboxes.images.importing import obtain
        from sandmill.sandboxes.images.store import store

        def work() -> Image:
            image, use = obtain(reference, store())
            try:
                store().save(image, name)
            finally:
                use.release()
            return image

        return await in_thread(work)

    def above(self, layer: str) -> Image:
        """This image with one more layer. Raises ImageError when there are too many.

        A layer that is among them already only moves to the top, where it hides what it was below: an overlay takes none twice.
        """
        layers = (*(one for one in self.layers if one != layer), layer)
        if len(layers) > MOST_LAYERS:
            raise ImageError(f"an image may have at most {MOST_LAYERS} layers; build it anew with fewer steps")
        return msgspec.structs.replace(self, layers=layers)


HOST: Final = Image(architecture=architecture())
"""No layers: this machine's own base, which needs no set-up."""
