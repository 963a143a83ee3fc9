"""Sandboxes on nodes across a restart of this server. In: records of before, beats. Out: sandboxes taken up again, or given up.

Until its node is heard of, nothing is done with such a sandbox: what its record says may be true still, and may not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Protocol

from sandmill.errors import SandboxError
from sandmill.server import layer
from sandmill.server.beats import Beat
from sandmill.server.known import Node
from sandmill.server.live import Live
from sandmill.server.node_sandbox import NodeSandbox
from sandmill.server.places import Claim, Places, need_of
from sandmill.server.records import Records


class Holder(Protocol):
    """Whose the sandboxes are: `Boxes`."""

    @property
    def live(self) -> dict[str, Live]: ...
    def soon(self, work: Awaitable[Any]) -> None: ...
    async def stop(self, project: str, name: str, reason: str) -> None: ...


class Keeper(Protocol):
    """Who says what became of them: `Survivors`."""

    async def resume(self, project: str, name: str, sandbox: NodeSandbox) -> None: ...
    async def lose(self, project: str, name: str, alive_until_s: float, why: str) -> None: ...


class Returning:
    """Those whose node has not been heard of yet. On the event loop only."""

    def __init__(self, records: Records, places: Places, alive_until_s: float) -> None:
        self._records = records
        self._places = places
        self._alive_until_s = alive_until_s
        self._expected: dict[str, tuple[str, str, asyncio.Event]] = {}
        """By uid: project, name, and when it is settled."""
        self.boxes: Holder
        self.survivors: Keeper

    def __contains__(self, uid: str) -> bool:
        return uid in self._expected

    def expect(self) -> frozenset[str]:
        """After a restart: the uids of sandboxes that may still run on their nodes. Before anything else looks at them."""
        for value in self._records.each("Sandbox"):
            meta, status = value["metadata"], value["status"]
            there = status.get("node")
            node = None if there is None else self._records.get("Node", "", there["name"])
            if there is None or node is None or node["status"]["phase"] not in ("Ready", "Draining"):
                continue
            if status["phase"] in ("Running", "Stopping", "Recovering", "Terminating"):
                claim = Claim(meta["uid"], there["name"], need_of(value["spec"]), there["sandbox"], there["epoch"])
                claim.starting = False
                self._places.keep(claim)
                self._expected[meta["uid"]] = (meta["namespace"], meta["name"], asyncio.Event())
        return frozenset(self._expected)

    async def settled(self, uid: str) -> None:
        """Until it is known what became of a sandbox of before the restart; at most as long as its node may be silent."""
        if (found := self._expected.get(uid)) is not None:
            await found[2].wait()

    def settle(self, node: Node, beat: Beat) -> None:
        """The node is back after a restart of this server: what it still has is taken up again."""
        for claim in self._places.on(node.name):
            if claim.uid not in self._expected or claim.uid in node.moving:
                continue
            node.moving.add(claim.uid)
            if claim.epoch == beat.epoch and beat.sandboxes.get(claim.name) == "":
                self.boxes.soon(self._adopt(node, claim, beat))
            else:
                why = beat.sandboxes.get(claim.name) or f"node {node.name} no longer has it"
                self.boxes.soon(self.give_up(node, claim, self._alive_until_s, why))

    async def _adopt(self, node: Node, claim: Claim, beat: Beat) -> None:
        project, name, settled = self._expected[claim.uid]
        value = self._records.get("Sandbox", project, name)
        try:
            if value is None or node.client is None:
                self._places.release(claim.uid)
                return
            made = layer.sandbox_spec(value["spec"], {}, value["status"].get("image", {}).get("digest"))
            labels = value["metadata"].get("labels", {})
            sandbox = NodeSandbox(made, node.client, claim.name, name, labels, rootless=beat.rootless)
            await self.survivors.resume(project, name, sandbox)
        except SandboxError as error:
            await self.survivors.lose(project, name, time.time(), f"it could not be taken up again: {error}")
        finally:
            node.moving.discard(claim.uid)
            self._expected.pop(claim.uid, None)
            settled.set()

    async def give_up(self, node: Node | None, claim: Claim, alive_until_s: float, why: str) -> None:
        """A sandbox, or what is left of its record, is lost."""
        expected = self._expected.get(claim.uid)
        found = expected[:2] if expected is not None else self.name_of(claim.uid)
        try:
            if found is not None:
                await self.survivors.lose(*found, alive_until_s, why)
        finally:
            self._places.release(claim.uid)
            if expected is not None:
                self._expected.pop(claim.uid, None)
                expected[2].set()
            if node is not None:
                node.moving.discard(claim.uid)

    def name_of(self, uid: str) -> tuple[str, str] | None:
        """Project and name of a live sandbox."""
        live = self.boxes.live.get(uid)
        return None if live is None else (live.project, live.name)
