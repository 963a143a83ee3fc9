"""The nodes of a server and their lives. In: beats, drains, removals, the clock. Out: places; sandboxes moved or lost.

A node is Ready while it beats, Draining when it is to take no more, Lost when it has been silent for longer than the lease it was given:
by then it has ended its sandboxes itself. What an epoch of a node held ends with that epoch, whoever ended it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final
from urllib.parse import urlsplit

from sandmill.config.quantities import parse_duration
from sandmill.errors import ConfigError
from sandmill.sandboxes.backends.remote.client import AnswerError, Client
from sandmill.sandboxes.backends.remote.http import UntrustedError
from sandmill.server.beats import BEAT_S, Beat, Told, capacity_of, free_of
from sandmill.server.events import Events
from sandmill.server.known import Node
from sandmill.server.node_sandbox import NodeSandbox
from sandmill.server.placement import Place
from sandmill.server.places import LOCAL, Claim, Places, Target
from sandmill.server.records import Records, Value, fine_stamp, fresh, now, seconds_of
from sandmill.server.refusals import Refusal, not_found
from sandmill.server.returning import Holder, Keeper, Returning
from sandmill.server.settings import Settings
from sandmill.server.statuses import DRAINED

_TICK_S: Final = 0.25
_STARTING_AT_ONCE: Final = 16
_MOVING_AT_ONCE: Final = 8
_KEPT_EPOCHS: Final = 8
_PROBED_AFTER_S: Final = 2.5 * BEAT_S
_PROBE_S: Final = 5.0
_log = logging.getLogger("sandmill.server")


class Nodes:
    """All nodes. On the event loop only."""

    def __init__(self, records: Records, events: Events, places: Places, settings: Settings, alive_until_s: float) -> None:
        self._records = records
        self._events = events
        self._places = places
        self._lease_s = settings.node_lease_s
        self._alive_until_s = alive_until_s
        self._nodes: dict[str, Node] = {value["metadata"]["name"]: Node(value["metadata"]["name"]) for value in records.each("Node")}
        self._returning = Returning(records, places, alive_until_s)
        self._moving = asyncio.Semaphore(_MOVING_AT_ONCE)
        places.awaited = self._awaited

    @property
    def boxes(self) -> Holder:
        """Whose the sandboxes are."""
        return self._returning.boxes

    def serve(self, boxes: Holder) -> None:
        """Says whose the sandboxes are, once that exists."""
        self._returning.boxes = boxes

    def report_to(self, survivors: Keeper) -> None:
        """Says who says what became of them, once that exists."""
        self._returning.survivors = survivors

    def expect(self) -> frozenset[str]:
        """After a restart: the uids of sandboxes that may still run on their nodes. Before anything else looks at them."""
        return self._returning.expect()

    async def settled(self, uid: str) -> None:
        """Until it is known what became of a sandbox of before the restart; at most as long as its node may be silent."""
        await self._returning.settled(uid)

    async def heard(self, name: str, registrar: str, beat: Beat) -> Told:
        """A node's beat. Raises Refusal: Conflict (another has taken its name), NotFound (removed), Expired (it was taken for lost)."""
        client = _client(beat)
        known = self._nodes.get(name)
        if beat.url.startswith("https:") and (known is None or known.beat is None or known.beat.url != beat.url):
            await _trusted(client)
        value = self._records.get("Node", "", name)
        if value is None:
            if beat.uid:
                raise not_found("nodes", name)
            value = await self._register(name, registrar, beat)
        value = await self._admit(value, registrar, beat)
        node = self._nodes.setdefault(name, Node(name))
        self._follow(node, beat, client)
        if value["status"]["phase"] != "Draining" and (beat.leaving or value["spec"]["state"] == "Draining"):
            value = self._set(value, phase="Draining", drainTime=now())
        if beat.leaving:
            node.drain_ends = 0.0
        self._returning.settle(node, beat)
        end = self._compare(node, beat)
        if beat.leaving and not self._places.on(name):
            ended = {**value["status"]["ended"], beat.epoch: "Left"}
            value = self._set(value, phase="Left", drainTime=None, message="the node has ended", ended=_newest(ended))
            self._drop(name, f"node {name} has ended")
        self._offer(node, value)
        return Told(uid=value["metadata"]["uid"], lease_s=self._lease_s, end=end, state=value["spec"]["state"])

    def changed(self, value: Value) -> None:
        """Its spec was edited."""
        name, wanted = value["metadata"]["name"], value["spec"]["state"]
        node = self._nodes.setdefault(name, Node(name))
        if wanted == "Draining" and value["status"]["phase"] == "Ready":
            value = self._set(value, phase="Draining", drainTime=now())
            self._events.note(value, "Draining", "the node takes no more sandboxes", warning=False)
        elif wanted == "Ready" and value["status"]["phase"] == "Draining":
            value = self._set(value, phase="Ready", drainTime=None)
        node.drain_ends = None
        self._offer(node, value)

    async def remove(self, name: str) -> None:
        """Forgets a node that holds nothing. Raises Refusal (Conflict) for one that does."""
        value = self._records.get("Node", "", name)
        if value is None:
            raise not_found("nodes", name)
        if held := len(self._places.on(name)):
            message = f"node {name!r} holds {held} sandboxes"
            raise Refusal("Conflict", message, fix=f"drain it first: sandmill node drain {name}", kind="nodes", name=name)
        self._drop(name, f"node {name} was removed")
        self._nodes.pop(name, None)
        if (done := self._records.remove("Node", "", name)) is not None:
            await self._records.store.durable(done)

    def shown(self, value: Value) -> Value:
        """The object with what changes all the time filled in."""
        name = value["metadata"]["name"]
        status = {**value["status"], "sandboxes": len(self._places.on(name))}
        node = self._nodes.get(name)
        if node is not None and node.beat is not None and node.seen_s is not None:
            machine = node.beat.machine
            status |= {"lastHeartbeatTime": fine_stamp(node.seen_s), "free": free_of(machine), "load": f"{machine.load:.2f}"}
        return {**value, "status": status}

    async def tick(self) -> None:
        """Sees who has gone silent and empties who drains, for ever."""
        while True:
            await asyncio.sleep(_TICK_S)
            for node in list(self._nodes.values()):
                value = self._records.get("Node", "", node.name)
                if value is None:
                    continue
                phase = value["status"]["phase"]
                silent_s = time.monotonic() - node.seen
                if phase in ("Ready", "Draining") and silent_s > self._silence_s:
                    self._lost(node, f"node {node.name} has not been heard of since {fine_stamp(self._last_seen(node.name))}")
                elif phase in ("Ready", "Draining") and silent_s > _PROBED_AFTER_S and node.beat is not None and not node.probed:
                    node.probed = True
                    self.boxes.soon(self._probe(node, node.beat))
                elif phase == "Draining":
                    self._empty(node, value)

    def _awaited(self) -> bool:
        found = [self._records.get("Node", "", node.name) for node in self._nodes.values() if node.beat is None]
        return any(value is not None and value["status"]["phase"] == "Ready" for value in found)

    @property
    def _silence_s(self) -> float:
        """Longer than the lease: by then the node has ended its sandboxes, unless it stands still itself."""
        return 1.25 * self._lease_s + 1.0

    async def _register(self, name: str, registrar: str, beat: Beat) -> Value:
        if name == LOCAL:
            raise Refusal("Conflict", f"a node cannot be called {LOCAL}: that is the server's own machine; choose another with --name")
        value = fresh("Node", name, None, {"state": "Ready", "drainTimeout": "10m"}, labels=beat.labels)
        value["status"] = {"phase": "Ready", "epoch": "", "registeredBy": registrar, "ended": {}}
        stored = await self._records.save("Node", "", value)
        self._events.note(stored, "Joined", f"a node joined from {beat.url[:200]}")
        return stored

    async def _admit(self, value: Value, registrar: str, beat: Beat) -> Value:
        """The Node object with this beat's epoch. Raises Refusal."""
        name, status = value["metadata"]["name"], value["status"]
        if status["registeredBy"] != registrar:
            raise Refusal("Forbidden", f"node {name!r} was registered with another key; remove it first", kind="nodes", name=name)
        if beat.uid and beat.uid != value["metadata"]["uid"]:
            raise not_found("nodes", name)
        if (cause := status["ended"].get(beat.epoch)) is not None:
            reason = "Conflict" if cause == "Replaced" else "Expired"
            said = "another process has joined under its name" if cause == "Replaced" else "it was silent for longer than its lease"
            raise Refusal(reason, f"node {name!r} was given up: {said}", kind="nodes", name=name)
        if status["epoch"] == beat.epoch and status["phase"] in ("Ready", "Draining"):
            return value
        if status["epoch"]:
            self._drop(name, f"node {name} has restarted", since_s=self._last_seen(name))
        ended = {**status["ended"], **({status["epoch"]: "Replaced"} if status["epoch"] not in (*status["ended"], "") else {})}
        phase = "Draining" if value["spec"]["state"] == "Draining" else "Ready"
        kept = {key: part for key, part in status.items() if key not in ("message", "reason")}
        about = {
            "phase": phase,
            "epoch": beat.epoch,
            "ended": _newest(ended),
            "url": beat.url,
            "version": beat.program,
            "architecture": beat.machine.architecture,
            "capacity": {**capacity_of(beat.machine), "sandboxes": str(beat.most)},
        }
        return await self._records.save("Node", "", {**value, "status": {**kept, **about}})

    def _follow(self, node: Node, beat: Beat, client: Client) -> None:
        """Takes the beat in; speaks with the node at the address and with the key that the beat names."""
        if node.beat is None or (node.beat.url, node.beat.key) != (beat.url, beat.key):
            if node.client is not None:
                node.client.close(f"node {node.name} has another address now")
            node.client = client
        node.beat, node.seen, node.seen_s = beat, time.monotonic(), time.time()

    def _offer(self, node: Node, value: Value) -> None:
        """Makes the node a target of placement, or takes it out."""
        beat, client, phase = node.beat, node.client, value["status"]["phase"]
        if beat is None or client is None or phase not in ("Ready", "Draining"):
            self._places.targets.pop(node.name, None)
            return
        closed = None if phase == "Ready" else "is being drained"

        def place() -> Place:
            return self._places.counted(
                Place(
                    name=node.name,
                    machine=beat.machine,
                    most=beat.most,
                    most_starting=_STARTING_AT_ONCE,
                    images=frozenset(beat.images),
                    closed=closed,
                )
            )

        self._places.targets[node.name] = Target(place, client, beat.epoch, beat.rootless)
        self._places.changed()

    def _compare(self, node: Node, beat: Beat) -> list[str]:
        """Holds what the node has against what it should have; the answer is what it is to end.

        A sandbox is believed to be strange, or missing, only when it was so in two beats: between them nothing is on its way any more.
        """
        claims = {claim.name: claim for claim in self._places.on(node.name) if claim.epoch == beat.epoch}
        strange = set(beat.sandboxes) - set(claims)
        end, node.strange = sorted(strange & node.strange), strange
        there = {name for name, claim in claims.items() if not claim.starting and claim.uid not in self._returning}
        missing = there - set(beat.sandboxes)
        for name in there:
            why = beat.sandboxes.get(name) or ("its node no longer has it" if name in missing & node.missing else None)
            if why:
                self._end(claims[name], why)
        node.missing = missing
        return end

    def _end(self, claim: Claim, why: str) -> None:
        """A sandbox ended by itself: the ticker of the sandboxes finds it dead."""
        live = self.boxes.live.get(claim.uid)
        if live is not None and isinstance(live.sandbox, NodeSandbox) and live.sandbox.alive:
            live.sandbox.lose(why)

    async def _probe(self, node: Node, beat: Beat) -> None:
        """A machine that refuses connections where its node listened has no such process any more, nor what that held: no need to wait."""
        parts = urlsplit(beat.url)
        try:
            async with asyncio.timeout(_PROBE_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
            writer.close()
        except ConnectionRefusedError:
            if node.beat is beat:
                self._lost(node, f"the process of node {node.name} has ended")
        except OSError as error:
            _log.warning("node %s is silent: %s", node.name, error or type(error).__name__)
        finally:
            node.probed = False

    def _lost(self, node: Node, why: str) -> None:
        value = self._records.get("Node", "", node.name)
        if value is None or value["status"]["phase"] not in ("Ready", "Draining"):
            return
        seen_s = self._last_seen(node.name)
        _log.warning("%s: its sandboxes are lost", why)
        ended = {**value["status"]["ended"], value["status"]["epoch"]: "Lost"}
        value = self._set(value, phase="Lost", reason="NoHeartbeat", message=why, ended=_newest(ended))
        self._events.note(value, "NodeLost", why, warning=True)
        self._drop(node.name, why, since_s=seen_s)

    def _drop(self, name: str, why: str, since_s: float | None = None) -> None:
        """Ends the conversation with what a node was until now: everything that waits on it fails, its sandboxes are lost."""
        node = self._nodes.get(name)
        self._places.targets.pop(name, None)
        if node is not None and node.client is not None:
            node.client.close(why)
            node.client = node.beat = None
        if node is not None:
            node.strange, node.missing = set(), set()
        for claim in self._places.on(name):
            # Those on their way, or being stopped, fail by themselves; a creation is then tried elsewhere.
            if not claim.starting and node is not None and claim.uid not in node.moving:
                node.moving.add(claim.uid)
                self.boxes.soon(self._returning.give_up(node, claim, time.time() if since_s is None else since_s, why))

    def _empty(self, node: Node, value: Value) -> None:
        """Stops what a draining node still holds: saved ones at once, the others at the deadline."""
        if node.drain_ends is None:
            began_s = seconds_of(value["status"]["drainTime"])
            node.drain_ends = time.monotonic() + parse_duration(value["spec"]["drainTimeout"]) - (time.time() - began_s)
        due = time.monotonic() >= node.drain_ends
        for claim in self._places.on(node.name):
            found = self._returning.name_of(claim.uid)
            if found is None or claim.starting or claim.uid in node.moving or claim.uid in self._returning:
                continue
            box = self._records.get("Sandbox", *found)
            if box is not None and (due or box["spec"]["continuity"]["mode"] == "Snapshotted"):
                node.moving.add(claim.uid)
                self.boxes.soon(self._move(node, claim, *found))

    async def _move(self, node: Node, claim: Claim, project: str, name: str) -> None:
        try:
            async with self._moving:
                await self.boxes.stop(project, name, DRAINED)
        finally:
            node.moving.discard(claim.uid)

    def _last_seen(self, name: str) -> float:
        node = self._nodes.get(name)
        return self._alive_until_s if node is None or node.seen_s is None else node.seen_s

    def _set(self, value: Value, **status: Any) -> Value:
        """Changes the status; None removes a field."""
        after = {key: part for key, part in {**value["status"], **status}.items() if part is not None}
        self._records.put("Node", "", {**value, "status": after})
        return self._records.get("Node", "", value["metadata"]["name"]) or value


def _client(beat: Beat) -> Client:
    try:
        return Client(beat.url, beat.key, "default")
    except ConfigError as error:
        raise Refusal("Invalid", f"the node cannot be reached there: {error.message}") from None


async def _trusted(client: Client) -> None:
    """Refuses a node that this server would never speak with: rather now than at its first sandbox. Raises Refusal."""
    try:
        async with asyncio.timeout(_PROBE_S):
            await client.ask("GET", "/livez")
    except UntrustedError as error:
        raise Refusal("Invalid", f"it will not speak with the node: {error}") from None
    except (OSError, AnswerError) as error:
        _log.warning("a node joins that does not answer yet: %s", error or type(error).__name__)


def _newest(ended: dict[str, str]) -> dict[str, str]:
    return dict(list(ended.items())[-_KEPT_EPOCHS:])
