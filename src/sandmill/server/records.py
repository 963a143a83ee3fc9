"""All objects, in memory and on disk. In: changes. Out: the objects, lists of them, and watches that miss nothing.

Memory is the truth while the server runs (one server owns its state); every change is queued for the store at once and published to
watchers once it is durable. Stored values are never changed in place. Versions never repeat: each start skips ahead, and a version
from the gap, which a watcher can only know from writes that a crash undid, is answered with Expired.
"""

from __future__ import annotations

import asyncio
import datetime
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from sandmill.server.kinds import BY_KIND
from sandmill.server.refusals import Refusal
from sandmill.server.store import Loaded, Store
from sandmill.server.tables import KEPT_CHANGES, Change, Write

Value = dict[str, Any]
"""One object as JSON. Never changed once stored."""
_START_GAP: Final = 1_000_000
_LARGEST_LOG: Final = 128 << 20
_LONGEST_BACKLOG: Final = 10_000


class Seen(NamedTuple):
    """A published change, as a watcher gets it."""

    version: int
    event: str
    kind: str
    project: str
    value: Value
    before: Value | None
    """The object before the change, for selectors that it has left."""
    size_bytes: int


class Watch:
    """One watcher's queue. Falls behind for ever when its reader is too slow, and then ends with Expired."""

    def __init__(self, kind: str, project: str | None) -> None:
        self.kind = kind
        self.project = project
        self.backlog: deque[Seen] = deque()
        self.lagging = False
        self._wake = asyncio.Event()

    def offer(self, seen: Seen) -> None:
        """Queues what concerns it."""
        if seen.kind != self.kind or (self.project is not None and seen.project != self.project):
            return
        if len(self.backlog) >= _LONGEST_BACKLOG:
            self.lagging = True
        else:
            self.backlog.append(seen)
        self._wake.set()

    async def next(self, patience_s: float) -> Seen | None:
        """The next change, None after `patience_s` without one. Raises Refusal (Expired) when it lost some."""
        if not self.backlog:
            self._wake.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if self.lagging:
            raise Refusal("Expired", "the watch could not keep up and has lost changes; list again")
        return self.backlog.popleft() if self.backlog else None


class Records:
    """Every object of the server. On the event loop only."""

    def __init__(self, store: Store, loaded: Loaded) -> None:
        self.store = store
        self._objects: dict[str, dict[tuple[str, str], Value]] = {kind: {} for kind in BY_KIND}
        for change in loaded.objects:
            if change.kind in self._objects:
                self._objects[change.kind][(change.project, change.name)] = msgspec.json.decode(change.body)
        self._log: deque[Seen] = deque()
        self._log_bytes = 0
        self._floor = loaded.changes[0].version - 1 if loaded.changes else 0
        """Everything after this version is in the log."""
        for change in loaded.changes:
            value = msgspec.json.decode(change.body)
            self._keep(Seen(change.version, change.event, change.kind, change.project, value, None, len(change.body)))
        last = max((change.version for change in (*loaded.objects, *loaded.changes)), default=0)
        self._stored = last
        self._first = self.version = last + _START_GAP if last else 1
        self.published = self.version
        """The newest version that watchers have been told of."""
        self._watches: set[Watch] = set()

    def get(self, kind: str, project: str, name: str) -> Value | None:
        """The object, None where there is none."""
        return self._objects[kind].get((project, name))

    def list(self, kind: str, project: str | None = None) -> list[Value]:
        """Those of one project, or all, by project and name."""
        chosen = self._objects[kind]
        return [chosen[key] for key in sorted(chosen) if project is None or key[0] == project]

    def count(self, kind: str, project: str) -> int:
        """How many a project has."""
        return sum(1 for owner, _ in self._objects[kind] if owner == project)

    def each(self, kind: str) -> Iterator[Value]:
        """All of a kind, in no order; safe while they change."""
        yield from list(self._objects[kind].values())

    def put(
        self, kind: str, project: str, value: Value, *also: Write, answer: Callable[[Value], Write | None] | None = None
    ) -> asyncio.Future[Any]:
        """Stores `value` under its name with a new version, together with `also` and what `answer` makes of the stored value.

        The future resolves when all of that is durable.
        """
        name = value["metadata"]["name"]
        before = self._objects[kind].get((project, name))
        self.version += 1
        value = {**value, "metadata": {**value["metadata"], "resourceVersion": str(self.version)}}
        self._objects[kind][(project, name)] = value
        said = None if answer is None else answer(value)
        extra = () if said is None else (said,)
        return self._publish("ADDED" if before is None else "MODIFIED", kind, project, value, before, (*also, *extra))

    def remove(self, kind: str, project: str, name: str, *also: Write) -> asyncio.Future[Any] | None:
        """Removes it; None where there is nothing to remove."""
        before = self._objects[kind].pop((project, name), None)
        if before is None:
            return None
        self.version += 1
        value = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.version)}}
        return self._publish("DELETED", kind, project, value, before, also)

    def free_name(self, kind: str, project: str, beginning: str) -> str:
        """A name that nothing has."""
        while (kind, name := beginning + secrets.token_hex(3)) and (project, name) in self._objects[kind]:
            continue
        return name

    def watch(self, kind: str, project: str | None, since: int | None) -> Watch:
        """From now on, or from just after version `since`. Raises Refusal (Expired). To be ended by `unwatch`."""
        watch = Watch(kind, project)
        if since is not None:
            if since > self.version or self._stored < since < self._first or since < self._floor:
                raise Refusal("Expired", f"version {since} is not known any more; list again and watch from there")
            for seen in self._log:
                if seen.version > since:
                    watch.offer(seen)
        self._watches.add(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch. Idempotent."""
        self._watches.discard(watch)

    async def save(
        self, kind: str, project: str, value: Value, *also: Write, answer: Callable[[Value], Write | None] | None = None
    ) -> Value:
        """`put`, waits until it is durable, and returns the object as stored then. Raises StoreUnavailable."""
        await self.store.durable(self.put(kind, project, value, *also, answer=answer))
        return self._objects[kind].get((project, value["metadata"]["name"]), value)

    def put_all(
        self, kind: str, project: str, values: Sequence[Value], answer: Callable[[Sequence[Value]], Write | None]
    ) -> tuple[Sequence[Value], asyncio.Future[Any]]:
        """`put` of new objects, all or nothing, together with what `answer` makes of them as stored."""
        steps: list[tuple[Change, Seen]] = []
        stored: list[Value] = []
        for value in values:
            self.version += 1
            value = {**value, "metadata": {**value["metadata"], "resourceVersion": str(self.version)}}
            self._objects[kind][(project, value["metadata"]["name"])] = value
            stored.append(value)
            steps.append(self._change("ADDED", kind, project, value, None))
        said = answer(stored)
        done = self.store.submit([*(change for change, _ in steps), *(() if said is None else (said,))])
        done.add_done_callback(lambda _: self._tell(*(seen for _, seen in steps)))
        return stored, done

    def fold(self, kind: str, project: str, names: Sequence[str], into: Value) -> None:
        """Removes objects and stores the one that stands for them, all or nothing."""
        steps: deque[tuple[Change, Seen]] = deque()
        for name in names:
            before = self._objects[kind].pop((project, name))
            self.version += 1
            gone = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.version)}}
            steps.append(self._change("DELETED", kind, project, gone, before))
        name = into["metadata"]["name"]
        before_it = self._objects[kind].get((project, name))
        self.version += 1
        stored = {**into, "metadata": {**into["metadata"], "resourceVersion": str(self.version)}}
        self._objects[kind][(project, name)] = stored
        steps.append(self._change("ADDED" if before_it is None else "MODIFIED", kind, project, stored, before_it))
        done = self.store.submit([change for change, _ in steps])
        done.add_done_callback(lambda _: self._tell(*(seen for _, seen in steps)))

    def _publish(
        self, event: str, kind: str, project: str, value: Value, before: Value | None, also: tuple[Write, ...]
    ) -> asyncio.Future[Any]:
        change, seen = self._change(event, kind, project, value, before)
        done = self.store.submit((change, *also))
        done.add_done_callback(lambda _: self._tell(seen))
        return done

    def _change(self, event: str, kind: str, project: str, value: Value, before: Value | None) -> tuple[Change, Seen]:
        """The newest version's change, for the store and for watchers."""
        meta = value["metadata"]
        body = msgspec.json.encode(value)
        change = Change(self.version, event, kind, project, meta["name"], meta.get("uid", ""), body)
        return change, Seen(self.version, event, kind, project, value, before, len(body))

    def _keep(self, seen: Seen) -> None:
        """Into the log, whose oldest entries make room."""
        self._log.append(seen)
        self._log_bytes += seen.size_bytes
        while len(self._log) > KEPT_CHANGES or self._log_bytes > _LARGEST_LOG:
            dropped = self._log.popleft()
            self._log_bytes -= dropped.size_bytes
            self._floor = dropped.version

    def _tell(self, *published: Seen) -> None:
        for seen in published:
            self._keep(seen)
            self.published = seen.version
            for watch in self._watches:
                watch.offer(seen)


def fresh(kind: str, name: str, project: str | None, spec: Value | None = None, **metadata: Any) -> Value:
    """A new object of a kind, with its identity."""
    meta = {"name": name, "uid": new_uid(), "creationTimestamp": now(), "generation": 1, **metadata}
    if project is not None:
        meta["namespace"] = project
    return {"apiVersion": BY_KIND[kind].api_version, "kind": kind, "metadata": meta, **({} if spec is None else {"spec": spec})}


def new_uid() -> str:
    """A UUID, as clients expect one."""
    text = secrets.token_hex(16)
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def now() -> str:
    """The time as objects carry it (RFC 3339, whole seconds)."""
    return stamp(datetime.datetime.now(datetime.UTC))


def stamp(moment: datetime.datetime | float) -> str:
    """A moment, or seconds since 1970, as RFC 3339."""
    if isinstance(moment, float | int):
        moment = datetime.datetime.fromtimestamp(moment, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def fine_stamp(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 with microseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(text: str) -> float:
    """Seconds since 1970 of a stamp of ours."""
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
