"""What happened to objects, for people. In: a reason and a sentence. Out: Event objects, the newest few thousand kept."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from sandmill.server.records import Records, Value, fresh, now

KEPT_EVENTS: Final = 5000


class Events:
    """The server's events."""

    def __init__(self, records: Records) -> None:
        self._records = records
        stored = sorted(records.list("Event"), key=lambda value: int(value["metadata"]["resourceVersion"]))
        self._names = deque(value["metadata"]["name"] for value in stored)
        self._number = max((int(name.rsplit("-", 1)[1], 16) for name in self._names), default=0)

    def note(self, about: Value, reason: str, message: str, *, warning: bool = False) -> None:
        """Records one event about an object."""
        self._number += 1
        meta = about["metadata"]
        reference: dict[str, Any] = {"apiVersion": about["apiVersion"], "kind": about["kind"], "name": meta["name"], "uid": meta["uid"]}
        if "namespace" in meta:
            reference["namespace"] = meta["namespace"]
        name = f"{meta['name'][:200]}-{self._number:x}"
        value = fresh("Event", name, None)
        value |= {
            "involvedObject": reference,
            "project": meta.get("namespace", ""),
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "firstTime": now(),
            "lastTime": now(),
            "count": 1,
        }
        self._names.append(name)
        self._records.put("Event", "", value)
        while len(self._names) > KEPT_EVENTS:
            self._records.remove("Event", "", self._names.popleft())
