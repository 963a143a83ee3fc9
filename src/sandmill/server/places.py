"""Where the sandboxes of a server are, and the line of those that wait. In: sandboxes to create. Out: live ones, here or on a node.

What is promised to each place is counted here, from the choice to the end; what is free there is measured. A creation that a node could
not carry out is tried elsewhere: nothing has run in it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sandmill.config.quantities import parse_bytes, parse_cpu
from sandmill.errors import ImageError, SandboxCreateFailed
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.images import store
from sandmill.server import layer, node_sandbox
from sandmill.server.machine import Machine, measured
from sandmill.server.node_sandbox import NodeSandbox
from sandmill.server.placement import FairQueue, Need, Place, Waiter, choose, explain, obstacle
from sandmill.server.records import Value
from sandmill.server.refusals import Refusal
from sandmill.server.settings import Settings

LOCAL: Final = "local"
"""The server's own machine, as a place."""
_TRIES: Final = 3
_STARTING_HERE: Final = 16
_STARTING_THERE: Final = 16
_MEASURED_FOR_S: Final = 1.0


class Claim:
    """A sandbox's hold on a place, from the choice of it to the sandbox's end."""

    def __init__(self, uid: str, place: str, need: Need, name: str, epoch: str) -> None:
        self.uid = uid
        self.place = place
        self.need = need
        self.name = name
        """What the sandbox is called on its node."""
        self.epoch = epoch
        """The node's, when the sandbox was made."""
        self.starting = True
        """On its way there."""


class _Tally:
    """What is promised to one place."""

    def __init__(self) -> None:
        self.claims: dict[str, Claim] = {}
        self.starting = 0
        self.cpu = 0.0
        self.memory_bytes = 0

    def add(self, claim: Claim) -> None:
        self.claims[claim.uid] = claim
        self.starting += claim.starting
        self.cpu += claim.need.cpu
        self.memory_bytes += claim.need.memory_bytes

    def started(self, claim: Claim) -> None:
        self.starting -= claim.starting
        claim.starting = False

    def remove(self, claim: Claim) -> None:
        del self.claims[claim.uid]
        self.started(claim)
        self.cpu -= claim.need.cpu
        self.memory_bytes -= claim.need.memory_bytes


class Target:
    """A node that may be given sandboxes."""

    def __init__(self, place: Callable[[], Place], client: Any, epoch: str, rootless: bool) -> None:
        self.place = place
        self.client = client
        self.epoch = epoch
        self.rootless = rootless


class _Ticket:
    def __init__(self, uid: str, name: str, need: Need, without: frozenset[str]) -> None:
        self.uid = uid
        self.name = name
        self.need = need
        self.without = without
        self.claim: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()


class Places:
    """All places of one server. On the event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._claims: dict[str, Claim] = {}
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._queue: FairQueue[_Ticket] = FairQueue()
        self._local: Machine | None = None
        self._local_at = 0.0
        self.local_closed: str | None = None if settings.local_sandboxes else "takes no sandboxes"
        self.targets: dict[str, Target] = {}
        """Nodes by name; kept by `Nodes`."""
        self.awaited: Callable[[], bool] = lambda: False
        """Whether nodes are to be heard of again, after a restart of this server."""

    def of(self, uid: str) -> Claim | None:
        """A sandbox's claim."""
        return self._claims.get(uid)

    def on(self, place: str) -> list[Claim]:
        """All claims on a place."""
        return list(self._tallies[place].claims.values())

    def images_on(self, place: str) -> set[str]:
        """The images that the sandboxes on a place have started from, or are to."""
        return {claim.need.image for claim in self.on(place) if claim.need.image is not None}

    def room_beside(self, uid: str, count: int) -> int:
        """How many of `count` more sandboxes like this one may come up where it is, now."""
        claim = self._claims[uid]
        here = next((place for place in self.all(claim.need) if place.name == claim.place), None)
        if here is None or obstacle(claim.need, msgspec.structs.replace(here, starting=0)) is not None:
            return 0
        return min(count, here.most - here.held)

    def where(self, uid: str) -> dict[str, Any]:
        """The part of a Sandbox's status that says where it is; nothing for the server's own machine."""
        claim = self._claims.get(uid)
        if claim is None or claim.place == LOCAL:
            return {}
        return {"node": {"name": claim.place, "epoch": claim.epoch, "sandbox": claim.name}}

    def keep(self, claim: Claim) -> None:
        """Counts a sandbox that is there, or is to be."""
        self._claims[claim.uid] = claim
        self._tallies[claim.place].add(claim)

    def keep_beside(self, other: str, value: Value, sandbox: Sandbox) -> None:
        """Counts a sandbox that came up where another one (its uid) is."""
        beside = self._claims[other]
        claim = Claim(value["metadata"]["uid"], beside.place, beside.need, sandbox.id, beside.epoch)
        claim.starting = False
        self.keep(claim)

    def release(self, uid: str) -> None:
        """The sandbox has ended. Idempotent."""
        if (claim := self._claims.pop(uid, None)) is not None:
            self._tallies[claim.place].remove(claim)
            self.changed()

    def check_room(self, spec: Value) -> None:
        """Before anything is promised: raises Refusal (CapacityUnavailable) when there is no place at all, or too many wait already."""
        if len(self._queue) >= self._settings.max_waiting:
            raise _no_room(f"{len(self._queue)} sandboxes wait for a place already")
        need = need_of(spec)
        places = self.all(need)
        if all(place.closed is not None for place in places) and not self.awaited():
            raise _no_room(explain(need, places))

    async def create(self, value: Value, made: SandboxSpec, kept: Path | None) -> Sandbox:
        """A live sandbox, in the least burdened place, when its project's turn has come; `kept` is the folder that it starts with.

        Raises Refusal (CapacityUnavailable) when that takes too long, SandboxError, OSError.
        """
        uid, tried = value["metadata"]["uid"], frozenset[str]()
        need = need_of(value["spec"], made.image)
        while True:
            claim = await self._turn(value, need, tried)
            try:
                sandbox = await self._create_at(claim, value, made, kept)
            except BaseException as error:
                self.release(uid)
                tried |= {claim.place}
                if not isinstance(error, SandboxCreateFailed) or claim.place == LOCAL or len(tried) >= _TRIES or self._all_in(tried):
                    raise
                continue
            self._tallies[claim.place].started(claim)
            self.changed()
            return sandbox

    def all(self, need: Need) -> list[Place]:
        """Every place as it is now."""
        places = [target.place() for target in self.targets.values()]
        if self._settings.local_sandboxes:
            here = Place(
                name=LOCAL,
                machine=self._here(),
                most=self._settings.local_sandboxes,
                most_starting=_STARTING_HERE,
                images=frozenset(() if need.image is None else (need.image,)),
                closed=self.local_closed,
            )
            places.append(self.counted(here))
        return places

    def counted(self, place: Place) -> Place:
        """A place with what is promised there."""
        tally = self._tallies[place.name]
        return Place(
            name=place.name,
            machine=place.machine,
            most=place.most,
            most_starting=place.most_starting,
            images=place.images,
            closed=place.closed,
            held=len(tally.claims),
            starting=tally.starting,
            held_cpu=tally.cpu,
            held_memory_bytes=tally.memory_bytes,
        )

    def changed(self) -> None:
        """Something was given back, or a node has reported: whoever can be served now is, in fair order."""
        hopeless: set[tuple[Need, frozenset[str]]] = set()
        for waiter in self._queue:
            ticket = waiter.what
            if (ticket.need, ticket.without) in hopeless:
                continue
            place = choose(ticket.need, [place for place in self.all(ticket.need) if place.name not in ticket.without])
            if place is None:
                hopeless.add((ticket.need, ticket.without))
                continue
            self._queue.serve(waiter)
            if not ticket.claim.done():
                target = self.targets.get(place.name)
                claim = Claim(ticket.uid, place.name, ticket.need, ticket.name, "" if target is None else target.epoch)
                self.keep(claim)
                ticket.claim.set_result(claim)

    async def _turn(self, value: Value, need: Need, without: frozenset[str]) -> Claim:
        meta = value["metadata"]
        ticket = _Ticket(meta["uid"], node_sandbox.new_name(meta["name"]), need, without)
        waiter: Waiter[_Ticket] = self._queue.enter(meta["namespace"], ticket)
        self.changed()
        try:
            async with asyncio.timeout(self._settings.longest_wait_s):
                claim = await ticket.claim
        except BaseException as error:
            self._queue.leave(waiter)
            if ticket.claim.done() and not ticket.claim.cancelled():
                self.release(meta["uid"])
            if isinstance(error, TimeoutError):
                places = [place for place in self.all(need) if place.name not in without]
                raise _no_room(explain(need, places)) from None
            raise
        return claim

    async def _create_at(self, claim: Claim, value: Value, made: SandboxSpec, kept: Path | None) -> Sandbox:
        meta = value["metadata"]
        if claim.place == LOCAL:
            sandbox = await layer.create(made, meta["name"], meta.get("labels", {}))
            try:
                if kept is not None:
                    await layer.restore(sandbox, kept)
            except BaseException:
                await sandbox.terminate.aio()
                raise
            return sandbox
        target = self.targets.get(claim.place)
        if target is None or target.epoch != claim.epoch:
            raise SandboxCreateFailed(f"node {claim.place} went away")
        return await node_sandbox.create(target.client, claim.name, value, made, kept, rootless=target.rootless)

    def _all_in(self, tried: Iterable[str]) -> bool:
        return not ({*self.targets, *([LOCAL] if self._settings.local_sandboxes else [])} - set(tried))

    def _here(self) -> Machine:
        now = time.monotonic()
        if self._local is None or now - self._local_at > _MEASURED_FOR_S:
            self._local, self._local_at = measured(self._settings.folder), now
        return self._local


def need_of(spec: Value, image: str | None = None) -> Need:
    """What a Sandbox's spec asks of a place; `image` is the digest of its image, None for the built-in one."""
    resources: Mapping[str, str] = spec["resources"]
    cpu, memory_bytes = parse_cpu(resources["cpu"]), parse_bytes(resources["memory"])
    return Need(cpu=cpu, memory_bytes=memory_bytes, image=image, architecture=_architecture_of(image))


def _architecture_of(image: str | None) -> str | None:
    """For which machines an image of this one's store is; None: for any, or it is not there, which its start says better."""
    if image is None:
        return None
    try:
        return store().find(image).architecture or None
    except ImageError:
        return None


def _no_room(message: str) -> Refusal:
    return Refusal("CapacityUnavailable", message, retry_after_s=5, fix="try again later, or join another node", kind="sandboxes")


__all__ = ["LOCAL", "Claim", "NodeSandbox", "Places", "Target", "need_of"]
