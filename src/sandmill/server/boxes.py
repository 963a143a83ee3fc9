"""The sandbox controller. In: Sandbox objects and what is asked of them. Out: live sandboxes, true statuses, money counted.

Every sandbox's transitions happen one after the other under its own lock. `start`, `stop` and `delete` say what is wanted; each is
idempotent. What is idle, too old, at its cap, or has died by itself is ended by `ticking.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from sandmill.errors import SandboxError, SandmillError
from sandmill.sandboxes import Sandbox
from sandmill.server import layer
from sandmill.server.billing import Billing
from sandmill.server.catalog import Catalog
from sandmill.server.costs import Meter, cost_status, microusd, rate_of
from sandmill.server.events import Events
from sandmill.server.keeping import Keeping
from sandmill.server.live import CAP, GONE, Live
from sandmill.server.nodes import Nodes
from sandmill.server.places import Places
from sandmill.server.records import Records, Value, fine_stamp, now, seconds_of
from sandmill.server.refusals import EXHAUSTED, Refusal, not_found
from sandmill.server.secrets import Secrets
from sandmill.server.settings import Settings
from sandmill.server.specs import DEFAULT_IMAGE
from sandmill.server.statuses import LOST, SENTENCES, SHUTDOWN, condition, loss_of

_log = logging.getLogger("sandmill.server")


class Boxes:
    """All sandboxes of the server."""

    def __init__(
        self,
        records: Records,
        events: Events,
        secrets: Secrets,
        catalog: Catalog,
        settings: Settings,
        places: Places,
        nodes: Nodes,
    ) -> None:
        self._records = records
        self.places = places
        self.nodes = nodes
        nodes.serve(self)
        self._events = events
        self._catalog = catalog
        self._billing = Billing(records)
        self._secrets = secrets
        self._settings = settings
        self.keeping = Keeping(settings.folder)
        self._live: dict[str, Live] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._coming: Counter[str] = Counter()
        """Starts under way, by project."""
        self.on_start: Callable[[Live, Value], Awaitable[None]] | None = None
        """Called when a sandbox has come up: starts its main command."""
        self.on_delete: Callable[[Value], None] | None = None
        """Called when a sandbox is removed: removes its processes."""

    @property
    def live(self) -> dict[str, Live]:
        """Those that are up, by uid."""
        return self._live

    def of(self, value: Value) -> Live | None:
        """The live sandbox of an object."""
        return self._live.get(value["metadata"]["uid"])

    def found(self, project: str, name: str) -> Value:
        """The object of that name. Raises Refusal."""
        return self._get(project, name)

    @contextlib.asynccontextmanager
    async def alone(self, project: str, name: str) -> AsyncIterator[Value]:
        """The object, while no transition of it is under way. Raises Refusal."""
        async with self._turn(self._get(project, name)):
            yield self._get(project, name)

    @contextlib.contextmanager
    def reserved(self, project: str, name: str, count: int) -> Iterator[None]:
        """Room for more sandboxes that are about to be up. Raises Refusal (QuotaExceeded)."""
        self.check_quota(project, name, count)
        self._coming[project] += count
        try:
            yield
        finally:
            self._coming[project] -= count

    def rate(self, spec: Value) -> int | None:
        """Micro-dollars per hour of a sandbox of this spec."""
        return rate_of(self._settings.prices, spec["resources"])

    def starting(self, value: Value) -> Value:
        """The object once its start was asked for and not yet begun; as it is, when it is up or can never be."""
        status = value["status"]
        if value["metadata"]["uid"] in self._live or status["phase"] == "Failed":
            return value
        return {**value, "status": {**{key: part for key, part in status.items() if key != "stopReason"}, "phase": "Starting"}}

    def shown(self, value: Value) -> Value:
        """The object with what changes all the time filled in."""
        live = self._live.get(value["metadata"]["uid"])
        if live is None or value["status"].get("phase") != "Running":
            return value
        return {**value, "status": {**value["status"], **live.status()}}

    def soon(self, work: Awaitable[Any]) -> None:
        """Runs a transition in the background; a refusal is already in the object's status."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    async def running(self, project: str, name: str) -> Live:
        """The live sandbox of that name, started if it is stopped. Raises Refusal."""
        value = self._get(project, name)
        live = self._live.get(value["metadata"]["uid"])
        if live is not None and live.stopping is None:
            return live
        if value["status"]["phase"] == "Stopped" and (loss := loss_of(value)) is not None:
            fix = "start it explicitly; files written since are lost"
            raise Refusal("SandboxNotRunning", f"sandbox {name!r} is stopped: {loss}", fix=fix, kind="sandboxes", name=name)
        if value["spec"]["state"] == "Stopped":
            self._records.put("Sandbox", project, self.starting({**value, "spec": {**value["spec"], "state": "Running"}}))
        return await self.start(project, name)

    async def start(self, project: str, name: str) -> Live:
        """Brings it up unless it is. Raises Refusal with the reason why it cannot."""
        await self._catalog.await_image(self._get(project, name))
        async with self._turn(self._get(project, name)):
            value = self._get(project, name)
            live = self._live.get(value["metadata"]["uid"])
            if live is not None:
                return live
            try:
                self._admit(value)
                self.check_quota(project, name)
            except Refusal as refusal:
                if value["status"].get("phase") in ("Pending", "Starting"):
                    self.put_now(value, phase="Stopped", stopReason=refusal.reason, message=refusal.message)
                raise
            with self.reserved(project, name, 1):
                try:
                    return await self._start(value)
                except Refusal as refusal:
                    if refusal.reason == "CapacityUnavailable":
                        self.put_now(value, phase="Stopped", stopReason=refusal.reason, message=refusal.message)
                    raise

    async def stop(self, project: str, name: str, reason: str, *, only: Live | None = None) -> None:
        """Brings it down, keeping what its continuity says. Idempotent. With `only`, nothing happens unless that is the run still."""
        value = self._records.get("Sandbox", project, name)
        if value is None:
            return
        async with self._turn(value):
            value = self._records.get("Sandbox", project, name)
            if value is None:
                return
            live = self._live.get(value["metadata"]["uid"])
            if live is not None and (only is None or only is live):
                await self._stop(value, live, reason)
            elif live is None and value["status"].get("phase") in ("Pending", "Starting"):
                await self._put(value, phase="Stopped", stopReason=reason, message=SENTENCES.get(reason, reason))

    async def delete(self, project: str, name: str, reason: str = "Deleted") -> None:
        """Removes it with everything that belongs to it. Idempotent."""
        value = self._records.get("Sandbox", project, name)
        if value is None:
            return
        if "deletionTimestamp" not in value["metadata"]:
            marked = {**value["metadata"], "deletionTimestamp": now()}
            status = {**value["status"], "phase": "Terminating", "reason": reason}
            value = await self._records.save("Sandbox", project, {**value, "metadata": marked, "status": status})
        async with self._turn(value):
            value = self._records.get("Sandbox", project, name)
            if value is None:
                return
            uid = value["metadata"]["uid"]
            if (live := self._live.get(uid)) is not None:
                live.stopping = reason
                await live.sandbox.terminate.aio()
                self._bill(value, live.meter, live.began_s, live.seconds)
                self.forget(uid)
            if self.on_delete is not None:
                self.on_delete(value)
            self.keeping.forget(uid)
            self._turns.pop(uid, None)
            self.places.release(uid)
            done = self._records.remove("Sandbox", project, name)
            self._events.note(value, reason, f"the sandbox was deleted: {SENTENCES.get(reason, 'it was asked for')}")
            if done is not None:
                await self._records.store.durable(done)
            if "image" in value["status"]:
                await self._catalog.release(value["status"]["image"])

    def limits_changed(self, value: Value) -> None:
        """Its lifecycle or cap was edited."""
        if (live := self.of(value)) is not None:
            live.limit(value)
            limit = value["spec"].get("maxCostUSD")
            live.meter = Meter(
                rate_microusd_per_hour=live.meter.rate_microusd_per_hour,
                limit_microusd=None if limit is None else microusd(limit),
                before_microusd=live.meter.before_microusd,
            )

    async def recover(self, alive_until_s: float, expected: frozenset[str]) -> None:
        """After a restart: what was up when the last server died, which was alive until then, is down, and its object says so.

        Those in `expected` may still run on their nodes, which will say so.
        """
        for value in self._records.each("Sandbox"):
            meta, status = value["metadata"], value["status"]
            if "deletionTimestamp" in meta:
                self.soon(self.delete(meta["namespace"], meta["name"]))
            elif meta["uid"] in expected:
                self.put_now(value, phase="Recovering")
            elif status.get("phase") in ("Running", "Stopping", "Recovering"):
                await self.mark_lost(value, alive_until_s)
            elif status.get("phase") in ("Pending", "Starting"):
                self.soon(self.start(meta["namespace"], meta["name"]))
        known = {value["metadata"]["uid"] for value in self._records.each("Sandbox")}
        self.keeping.sweep(known)

    async def close(self) -> None:
        """Stops every sandbox as if asked to, so that nothing that should survive is lost."""
        stops = [self.stop(live.project, live.name, SHUTDOWN) for live in list(self._live.values())]
        await asyncio.gather(*stops, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()

    def _get(self, project: str, name: str) -> Value:
        value = self._records.get("Sandbox", project, name)
        if value is None:
            raise not_found("sandboxes", name)
        if "deletionTimestamp" in value["metadata"]:
            raise Refusal("SandboxNotRunning", f"sandbox {name!r} is being deleted", kind="sandboxes", name=name)
        return value

    def forget(self, uid: str) -> None:
        """It is down: its place may be taken."""
        self._live.pop(uid, None)
        self.places.release(uid)

    @contextlib.asynccontextmanager
    async def _turn(self, value: Value) -> AsyncIterator[None]:
        """Alone with it, and only once it is known what became of it in a restart."""
        await self.nodes.settled(value["metadata"]["uid"])
        async with self.lock(value):
            yield

    def lock(self, value: Value) -> asyncio.Lock:
        """Held by whoever changes what a sandbox is."""
        return self._turns.setdefault(value["metadata"]["uid"], asyncio.Lock())

    def _admit(self, value: Value) -> None:
        """Cap and phase. Raises Refusal."""
        meta, status = value["metadata"], value["status"]
        if status.get("phase") == "Failed":
            message = f"sandbox {meta['name']!r} has failed for good: {status.get('message', status.get('reason'))}"
            raise Refusal("SandboxFailed", message, fix="delete it and create another", kind="sandboxes", name=meta["name"])
        limit = value["spec"].get("maxCostUSD")
        spent = microusd(status.get("cost", {}).get("totalUSD"))
        if limit is not None and spent >= microusd(limit):
            message = f"sandbox {meta['name']!r} has spent its maxCostUSD of {limit}"
            raise Refusal("BudgetExceeded", message, fix="raise spec.maxCostUSD", kind="sandboxes", name=meta["name"])

    def check_quota(self, project: str, name: str, count: int = 1) -> None:
        """Raises Refusal (QuotaExceeded) when the project may not have so many more sandboxes up."""
        up = self._coming[project] + sum(1 for live in self._live.values() if live.project == project)
        if up + count > self._settings.max_running:
            message = f"project {project!r} has {up} sandboxes running, which is its quota"
            raise Refusal("QuotaExceeded", message, retry_after_s=5, fix="stop or delete some", kind="sandboxes", name=name)

    async def _start(self, value: Value) -> Live:
        meta, spec = value["metadata"], value["spec"]
        mount = await self._secrets.given(value)
        sandbox = None
        try:
            image = await self.pinned(value)
            made = layer.sandbox_spec(spec, mount.env, None if image is None else image["digest"])
            sandbox = await self.places.create(value, made, self.keeping.of(value))
            if mount.files:
                await layer.give_secrets(sandbox, mount.files)
        except (SandmillError, OSError, TimeoutError, Refusal) as error:
            if sandbox is not None:
                await sandbox.terminate.aio()
            self.places.release(meta["uid"])
            if isinstance(error, Refusal) and error.reason == "CapacityUnavailable":
                raise
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                message = f"{error.strerror}; nothing was started"
                raise Refusal("CapacityUnavailable", message, retry_after_s=5, kind="sandboxes", name=meta["name"]) from error
            raise await self._failed(value, error) from error
        status = self.adopt(value, sandbox, mount.files)
        self.put_now(value, gone=("stopReason", "reason", "message", "activity", "node"), **status, secretVersions=mount.versions)
        live = self._live[meta["uid"]]
        if status["attempt"]["epoch"] > 1:
            self._events.note(value, "Started", "the sandbox was started again")
        if self.on_start is not None:
            await self.on_start(live, value)
        return live

    def adopt(self, value: Value, sandbox: Sandbox, secrets: Mapping[str, bytes]) -> dict[str, Any]:
        """From now on the sandbox is that object's, billed and watched. Returns what its status says then; the caller stores it at once."""
        meta, status = value["metadata"], value["status"]
        if self.places.of(meta["uid"]) is None:
            self.places.keep_beside(status["forkedFrom"]["uid"], value, sandbox)
        live = self._live[meta["uid"]] = Live(value, sandbox, self.meter(value), secrets)
        epoch = status.get("attempt", {}).get("epoch", 0) + 1
        return {
            "phase": "Running",
            **self.places.where(meta["uid"]),
            "startTime": fine_stamp(live.began_s),
            "attempt": {"name": f"{meta['name']}-{epoch}", "epoch": epoch},
            "conditions": [condition("Ready", "True", "Running", "the sandbox takes commands")],
            **live.status(),
        }

    async def pinned(self, value: Value) -> Value | None:
        """`status.image` of an object, decided before its first start and kept; None is the built-in image. Raises Refusal."""
        pinned = self._catalog.pin(value)
        if pinned is None and value["spec"]["image"] != DEFAULT_IMAGE:
            raise Refusal("ImageNotFound", f"image {value['spec']['image']!a} was not made in time")
        if pinned is not None:
            if pinned != value["status"].get("image"):
                self.put_now(value, image=pinned)
            await self._catalog.hold(pinned)
        return pinned

    async def _failed(self, value: Value, error: Exception) -> Refusal:
        message = str(error) or type(error).__name__
        self._events.note(value, "StartupFailed", message, warning=True)
        await self._put(value, phase="Failed", reason="StartupFailed", message=message)
        _log.warning("sandbox %s could not be started: %s", value["metadata"]["name"], message)
        return Refusal("SandboxFailed", message, kind="sandboxes", name=value["metadata"]["name"])

    async def _stop(self, value: Value, live: Live, reason: str) -> None:
        uid = live.uid
        live.stopping = reason
        self.put_now(value, phase="Stopping", stopReason=reason)
        saved = None
        with contextlib.suppress(SandboxError):
            await live.sandbox.kill_processes.aio()
        if reason != GONE and value["spec"]["continuity"]["mode"] == "Snapshotted":
            saved = await self.keeping.save(live)
        refused = await layer.blocked(live.sandbox)
        why = live.sandbox.gone_reason
        await live.sandbox.terminate.aio()
        cost = self._bill(value, live.meter, live.began_s, live.seconds)
        self.forget(uid)
        message = SENTENCES.get(reason) or f"it ended by itself: {why}"
        status: dict[str, Any] = {"phase": "Stopped", "stopReason": reason, "message": message, "activity": "Idle", "cost": cost}
        status["conditions"] = [condition("Ready", "False", reason, message), *([] if saved is None else [saved])]
        if refused:
            status["blocked"] = refused
        if saved is not None and saved["status"] == "True":
            status["snapshot"] = {"reason": "Stop", "time": now()}
        if reason == GONE and value["spec"]["continuity"]["mode"] == "Snapshotted" and "snapshot" not in value["status"]:
            status |= {"phase": "Failed", "reason": GONE}
        self._events.note(value, "Stopped", message, warning=reason in (GONE, CAP))
        await self._put(value, **status)

    def _bill(self, value: Value, meter: Meter, began_s: float, seconds: float) -> dict[str, Any]:
        """A run's usage record, stored; and `status.cost` after the run."""
        self._billing.run(value, meter, began_s, seconds)
        return cost_status(meter, seconds, running=False)

    def meter(self, value: Value) -> Meter:
        """For a run that begins, or goes on, with what the runs before it cost."""
        limit = value["spec"].get("maxCostUSD")
        return Meter(
            rate_microusd_per_hour=self.rate(value["spec"]),
            limit_microusd=None if limit is None else microusd(limit),
            before_microusd=microusd(value["status"].get("cost", {}).get("totalUSD")),
        )

    async def mark_lost(self, value: Value, alive_until_s: float, why: str = "the server ended without stopping it") -> None:
        """It was up until then, and nobody stopped it. Under its lock."""
        status = value["status"]
        began_s = seconds_of(status["startTime"]) if "startTime" in status else alive_until_s
        cost = self._bill(value, self.meter(value), began_s, max(0.0, alive_until_s - began_s))
        saved = status.get("snapshot") is not None and self.keeping.path(value["metadata"]["uid"]).exists()
        message = f"{why}; everything in it is gone"
        if saved:
            message = f"{why}; its workspace is that of {status['snapshot']['time']}"
        self._events.note(value, LOST, message, warning=True)
        conditions = [condition("Ready", "False", LOST, message), condition("StateSaved", "False", LOST, message)]
        phase = "Stopped" if saved else "Failed"
        reasons = {"stopReason": LOST} if saved else {"stopReason": LOST, "reason": LOST}
        await self._put(value, phase=phase, message=message, activity="Idle", conditions=conditions, cost=cost, **reasons)

    def put_now(self, value: Value, *, gone: tuple[str, ...] = (), **status: Any) -> asyncio.Future[Any]:
        """Changes the status of the object as it is now: a caller may have edited the rest while a transition was under way."""
        meta = value["metadata"]
        now_stored = self._records.get("Sandbox", meta["namespace"], meta["name"]) or value
        kept = {key: part for key, part in now_stored["status"].items() if key not in gone}
        return self._records.put("Sandbox", meta["namespace"], {**now_stored, "status": {**kept, **status}})

    async def _put(self, value: Value, **status: Any) -> None:
        await self._records.store.durable(self.put_now(value, **status))

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refusal):
            _log.error("a sandbox's transition failed", exc_info=error)
