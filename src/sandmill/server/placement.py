"""Where a sandbox goes, and whose turn it is. In: what it needs, the places there are, who waits. Out: a place; the next in line.

Pure and deterministic: the same question has the same answer, in whatever order the places are named.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from sandmill.server.machine import Machine

LEAST_FREE_MEMORY: Final = 64 << 20
LEAST_FREE_DISK: Final = 16 << 20
LEAST_FREE_PIDS: Final = 300
"""A sandbox's own limit is 256: below this, the next one could take what the machine itself needs."""
BRINGING: Final = 0.25
T = TypeVar("T")


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox asks for. `image` None: every place has it; others are brought there. `architecture` None: any will do."""

    cpu: float
    memory_bytes: int
    image: str | None = None
    architecture: str | None = None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as placement sees it: measured a moment ago, with what has been promised there counted exactly."""

    name: str
    machine: Machine
    most: int
    """Sandboxes it may hold."""
    most_starting: int
    """Sandboxes that may be on their way there at once."""
    held: int = 0
    """Sandboxes it holds, those on their way included."""
    starting: int = 0
    held_cpu: float = 0.0
    held_memory_bytes: int = 0
    images: frozenset[str] = frozenset()
    """Those that need not be brought there."""
    closed: str | None = None
    """Why it takes none, if it takes none."""


def obstacle(need: Need, place: Place) -> str | None:
    """Why the sandbox cannot go there now, None when it can."""
    free = place.machine.free
    if place.closed is not None:
        return place.closed
    if need.architecture not in (None, place.machine.architecture):
        return f"is {place.machine.architecture}, not {need.architecture}"
    if place.held >= place.most:
        return f"holds {place.held} sandboxes, which is its limit"
    if free.memory_bytes < LEAST_FREE_MEMORY:
        return "has no memory left"
    if free.disk_bytes < LEAST_FREE_DISK:
        return "has no disk space left"
    if free.pids < LEAST_FREE_PIDS:
        return "has no process ids left"
    if place.starting >= place.most_starting:
        return "is starting as many sandboxes as it may at once"
    return None


def burden(need: Need, place: Place) -> float:
    """How heavily the place would be used with the sandbox on it: the most promised share, and the most used one.

    A place that has the image may be used by BRINGING more than another before the image is brought to that one.
    """
    capacity, free = place.machine.capacity, place.machine.free
    cores = max(0.01, capacity.cpu)
    promised = max(
        (place.held_cpu + need.cpu) / cores,
        (place.held_memory_bytes + need.memory_bytes) / max(1, capacity.memory_bytes),
        (place.held + 1) / place.most,
    )
    used = max(place.machine.load / cores, 1 - free.memory_bytes / max(1, capacity.memory_bytes))
    brought = need.image is not None and need.image not in place.images
    return promised + used + (BRINGING if brought else 0.0)


def choose(need: Need, places: Iterable[Place]) -> Place | None:
    """The least burdened place that can take it; among equals the first by name."""
    able = [place for place in places if obstacle(need, place) is None]
    return min(able, key=lambda place: (burden(need, place), place.name), default=None)


def explain(need: Need, places: Sequence[Place]) -> str:
    """Why no place can take it, in one sentence."""
    if not places:
        return "there is no node; join one with `sandmill node join`"
    said = [f"{place.name} {obstacle(need, place) or 'could'}" for place in sorted(places, key=lambda place: place.name)]
    more = f" and {len(said) - 4} more" if len(said) > 4 else ""
    return "no node has room: " + ", ".join(said[:4]) + more


class Waiter(NamedTuple, Generic[T]):
    """One that waits: served by turn, then by number."""

    turn: int
    number: int
    project: str
    what: T


class FairQueue(Generic[T]):
    """Start-time fair queueing: projects take turns, however many each has waiting; within one, first come, first served.

    A newcomer's turn is the one after that which was served last, or after its own project's last.
    """

    def __init__(self) -> None:
        self._line: list[Waiter[T]] = []
        self._now = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiter[T]]:
        """Who is next, in order; safe while it changes."""
        return iter(tuple(self._line))

    def enter(self, project: str, what: T) -> Waiter[T]:
        """Takes a place in the line."""
        self._number += 1
        last = next((waiter.turn for waiter in reversed(self._line) if waiter.project == project), 0)
        turn = max(self._now, last) + 1
        waiter = Waiter(turn, self._number, project, what)
        bisect.insort(self._line, waiter, key=_order)
        return waiter

    def serve(self, waiter: Waiter[T]) -> None:
        """It is served, and leaves."""
        self._now = max(self._now, waiter.turn)
        self.leave(waiter)

    def leave(self, waiter: Waiter[T]) -> None:
        """It waits no longer. Idempotent."""
        at = bisect.bisect_left(self._line, _order(waiter), key=_order)
        if at < len(self._line) and self._line[at].number == waiter.number:
            del self._line[at]


def _order(waiter: Waiter[T]) -> tuple[int, int]:
    return waiter.turn, waiter.number
