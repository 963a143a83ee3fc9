"""What a backend has to offer: a place where the guest (native/guest.c) runs, its standard input and its standard output. In: a spec.
Out: a `Machine`. Everything else that a sandbox does goes over those two streams and is the same for all of them (backends/guest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from sandmill.config.manifest import BackendName
from sandmill.sandboxes.spec import SandboxSpec


class Usable(msgspec.Struct, frozen=True, kw_only=True):
    """Whether sandboxes can be made here. `fix` is empty when they can."""

    ok: bool
    says: str
    fix: str = ""


class Hearing(Protocol):
    """Who listens to a machine. Called on the sandbox loop."""

    def received(self, data: bytes) -> None:
        """The guest wrote this to its standard output."""
        ...

    def ended(self, why: str) -> None:
        """Nothing more will come; "" when nobody knows why."""
        ...


class Machine(Protocol):
    """Where one guest runs. On the sandbox loop."""

    @property
    def id(self) -> str:
        """What the backend calls it."""
        ...

    def send(self, data: bytes) -> None:
        """Queues for the guest's standard input, in order. Never waits and never raises: what cannot be sent ends the machine."""
        ...

    async def destroy(self) -> None:
        """Removes it and all that belongs to it. Idempotent. Raises SandboxError when it may still be there."""
        ...


class Backend(Protocol):
    """A kind of machine. One object serves every sandbox of this process; on the sandbox loop."""

    @property
    def name(self) -> BackendName: ...

    @property
    def text(self) -> bool:
        """Its streams carry text only: the guest speaks base64."""
        ...

    @property
    def start_s(self) -> float:
        """How long a guest may take until it says its first word."""
        ...

    def lacks(self, spec: SandboxSpec) -> str | None:
        """One sentence on what it cannot hold a sandbox to, None when everything holds."""
        ...

    def check(self, spec: SandboxSpec) -> None:
        """Raises Unsupported or ConfigError for what it cannot give, before anything is started."""
        ...

    async def create(self, spec: SandboxSpec, guest: Sequence[str], hearing: Hearing) -> Machine:
        """Starts a machine and in it the guest with these arguments. Raises IsolationUnavailable, SandboxCreateFailed, ConfigError; then
        nothing is left."""
        ...

    async def usable(self) -> Usable:
        """Whether it could make one now. Makes none that costs money."""
        ...


__all__ = ["Backend", "BackendName", "Hearing", "Machine", "Usable"]
