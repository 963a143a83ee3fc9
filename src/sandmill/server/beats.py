"""What a node and its head tell each other, once a second. In: JSON. Out: frozen values, or a refusal.

The node speaks, the head answers; between them a head holds no connection open and keeps no key of a node's on disk. `version` is that
of this conversation: nodes and heads of other versions refuse each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from sandmill.server.machine import Machine
from sandmill.server.refusals import Refusal, invalid
from sandmill.server.schema import Causes
from sandmill.server.specs import METADATA

VERSION: Final = 1
BEAT_S: Final = 1.0
LONGEST: Final = 8 << 20
"""Bytes of one beat: tens of thousands of sandboxes."""


_Word = Annotated[str, msgspec.Meta(max_length=512)]


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's sign of life, with all there is to know about it."""

    version: int
    epoch: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]{1,64}$")]
    """Changes whenever the node has let go of all sandboxes: at its start, and when it could not reach its head for too long."""
    uid: _Word = ""
    """The Node object's, once the head has said it: a node that was removed does not come back by itself."""
    url: _Word
    key: _Word
    """Lets the head in, and nobody else; lives as long as the epoch."""
    program: _Word
    machine: Machine
    most: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    rootless: bool
    labels: dict[str, str]
    images: list[_Word]
    sandboxes: dict[_Word, _Word]
    """By their names on the node: nothing while they are well, otherwise why they ended."""
    leaving: bool = False
    """The node is about to end: what can be saved should be, now."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The head's answer."""

    uid: str
    lease_s: float
    """A node that has had no answer for so long ends its sandboxes: the head takes them for lost a little later."""
    end: list[str]
    """Sandboxes that the head knows nothing of."""
    state: str


def beat_of(body: bytes) -> Beat:
    """Raises Refusal (BadRequest, Unsupported, Invalid)."""
    try:
        said = msgspec.json.decode(body, type=_Version)
        if said.version != VERSION:
            message = f"the node speaks version {said.version}, this server {VERSION}; run the same sandmill on both"
            raise Refusal("Unsupported", message)
        beat = msgspec.json.decode(body, type=Beat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("BadRequest", f"this is no node's report: {ascii(str(error))[1:-1][:200]}") from None
    causes = Causes()
    METADATA.check({"labels": beat.labels}, "metadata", causes)
    if causes.found:
        raise invalid("nodes", "", causes.found)
    return beat


class _Version(msgspec.Struct, frozen=True):
    version: int


def capacity_of(machine: Machine) -> Mapping[str, str]:
    """As a Node object shows it."""
    whole = machine.capacity
    return {"cpu": f"{whole.cpu:g}", "memory": _quantity(whole.memory_bytes), "disk": _quantity(whole.disk_bytes)}


def free_of(machine: Machine) -> Mapping[str, str]:
    """As a Node object shows it."""
    free = machine.free
    return {"cpu": f"{free.cpu:.1f}", "memory": _quantity(free.memory_bytes), "disk": _quantity(free.disk_bytes), "pids": str(free.pids)}


def _quantity(size_bytes: int) -> str:
    return f"{size_bytes >> 20}Mi"
