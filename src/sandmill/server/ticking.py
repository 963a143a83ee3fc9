"""Ends that nobody asks for. In: live sandboxes and the time. Out: stops and deletes of what is idle, too old, at its cap, or dead."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from sandmill.server.boxes import Boxes
from sandmill.server.live import IDLE, LIFETIME, Live
from sandmill.server.records import Records, stamp

_TICK_S: Final = 0.25
_SWEEP_S: Final = 5.0


async def tick(boxes: Boxes, records: Records) -> None:
    """Ends what is due, for ever."""
    swept = 0.0
    while True:
        await asyncio.sleep(_TICK_S)
        moment, wall = time.monotonic(), time.time()
        for live in list(boxes.live.values()):
            if live.stopping is None and (reason := live.due(moment, wall)) is not None:
                live.stopping = reason
                boxes.soon(_end(boxes, records, live, reason))
        if wall >= swept + _SWEEP_S:
            swept = wall
            _sweep(boxes, records, stamp(wall))


def _sweep(boxes: Boxes, records: Records, moment: str) -> None:
    """Deletes what is down and too old."""
    for value in records.each("Sandbox"):
        meta = value["metadata"]
        if value["status"]["expirationTime"] <= moment and meta["uid"] not in boxes.live and "deletionTimestamp" not in meta:
            boxes.soon(boxes.delete(meta["namespace"], meta["name"], LIFETIME))


async def _end(boxes: Boxes, records: Records, live: Live, reason: str) -> None:
    """A limit was reached, or it died."""
    value = records.get("Sandbox", live.project, live.name)
    if value is None:
        return
    if reason == LIFETIME or (reason == IDLE and value["spec"]["lifecycle"]["onIdle"] == "Delete"):
        await boxes.delete(live.project, live.name, reason)
    else:
        await boxes.stop(live.project, live.name, reason, only=live)
