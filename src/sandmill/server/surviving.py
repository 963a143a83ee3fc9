"""What outlives a server, and what does not outlive its node. In: sandboxes that a node still has, or has no more. Out: true objects.

A sandbox on a node runs on while its head is away, with its commands: both are taken up where they were. What is lost is said to be, until
when it was alive, and every byte that its commands had written by then is kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from sandmill.server.boxes import Boxes
from sandmill.server.commands import ENDED, Commands
from sandmill.server.live import LOST, Live
from sandmill.server.node_sandbox import NodeSandbox
from sandmill.server.outputs import Log, Outputs
from sandmill.server.records import Records, Value, fine_stamp, seconds_of
from sandmill.server.refusals import Refusal
from sandmill.server.secrets import Secrets


class Survivors:
    """Sandboxes on nodes and their commands, across deaths. On the event loop only."""

    def __init__(self, records: Records, boxes: Boxes, commands: Commands, outputs: Outputs, secrets: Secrets) -> None:
        self._records = records
        self._boxes = boxes
        self._commands = commands
        self._outputs = outputs
        self._secrets = secrets
        self._unsure: dict[str, Log] = {}
        """Output of commands that may have outlived the last server, by uid."""
        boxes.nodes.report_to(self)

    async def recover(self, expected: frozenset[str]) -> None:
        """After a restart: no command runs still, and its object says so; but for sandboxes in `expected` (uids) that is not sure."""
        for value in self._records.each("Process"):
            if value["status"]["phase"] in ENDED:
                continue
            if value["metadata"]["ownerReferences"][0]["uid"] in expected:
                self._unsure[value["metadata"]["uid"]] = await self._outputs.resume(value["metadata"]["uid"])
            else:
                self._fail(value, "the server ended while this ran")

    async def resume(self, project: str, name: str, sandbox: NodeSandbox) -> None:
        """Takes up a sandbox that has outlived the last server. Raises SandboxError."""
        value = self._records.get("Sandbox", project, name)
        if value is None:
            return
        async with self._boxes.lock(value):
            await sandbox.recall()
            live = Live(value, sandbox, self._boxes.meter(value), await self._files(value))
            live.since(seconds_of(value["status"]["startTime"]))
            await self._resume_commands(live, sandbox)
            self._boxes.live[live.uid] = live
            if "deletionTimestamp" not in value["metadata"]:
                self._boxes.put_now(value, phase="Running")
        if (reason := value["status"].get("stopReason")) is not None:
            self._boxes.soon(self._boxes.stop(project, name, reason))

    async def lose(self, project: str, name: str, alive_until_s: float, why: str) -> None:
        """Its node is gone, and was last heard of then: it is down, and its object says so."""
        value = self._records.get("Sandbox", project, name)
        if value is None:
            return
        uid = value["metadata"]["uid"]
        live = self._boxes.live.get(uid)
        if live is not None:
            live.stopping = live.stopping or LOST
            live.over(alive_until_s)
            if isinstance(live.sandbox, NodeSandbox):
                live.sandbox.lose(why)
        async with self._boxes.lock(value):
            value = self._records.get("Sandbox", project, name)
            if value is None or self._boxes.live.get(uid) is not live:
                return
            self._boxes.forget(uid)
            if live is None:
                for command in self._commands.unended(uid, project):
                    self._fail(command, why)
            if "deletionTimestamp" not in value["metadata"]:
                await self._boxes.mark_lost(value, alive_until_s, why)

    async def _resume_commands(self, live: Live, sandbox: NodeSandbox) -> None:
        """Those that the node runs for nobody are killed there: the last server ended before it knew of them."""
        there = await sandbox.processes()
        for value in self._commands.unended(live.uid, live.project):
            found = there.pop(value["status"].get("nodeProcess", ""), None)
            if found is None:
                self._fail(value, "the server ended while this was being started")
                continue
            log = self._unsure.pop(value["metadata"]["uid"])
            self._commands.take_up(value, live, log, await sandbox.resume(found, log.lengths))
            if value["spec"].get("state") == "Cancelled":
                await self._commands.cancel(value)
        for name, found in there.items():
            if found["status"]["phase"] not in ENDED:
                await sandbox.cancel(name)

    async def _files(self, value: Value) -> Mapping[str, bytes]:
        """The secrets that it was given; nothing where they are there no more."""
        try:
            return (await self._secrets.given(value)).files
        except Refusal:
            return {}

    def _fail(self, value: Value, why: str) -> None:
        message = f"{why}; its output up to then is kept"
        ended = {"phase": "Failed", "reason": LOST, "message": message, "completionTime": fine_stamp(time.time())}
        log = self._unsure.pop(value["metadata"]["uid"], None)
        pieces = [] if log is None else self._outputs.rest(log)
        self._records.put("Process", value["metadata"]["namespace"], {**value, "status": {**value["status"], **ended}}, *pieces)
