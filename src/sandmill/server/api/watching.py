"""Watches. In: a place in the history and a selection. Out: one JSON event a line, for as long as the client listens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

import msgspec
from starlette.responses import Response, StreamingResponse

from sandmill.server.api.context import Asked
from sandmill.server.api.selecting import Selection
from sandmill.server.api.tables import table, wants_table
from sandmill.server.kinds import Kind
from sandmill.server.records import Seen, Value, Watch
from sandmill.server.refusals import Refusal
from sandmill.server.schema import shown

_BOOKMARK_S: Final = 15.0
_LONGEST_S: Final = 3600.0


async def watch(asked: Asked, kind: Kind, project: str | None, chosen: Selection, query: Mapping[str, str]) -> Response:
    """Starts a watch. Raises Refusal (Expired) before the first line where the place is not known any more."""
    since = query.get("resourceVersion") or "0"
    if not since.isascii() or not since.isdigit() or len(since) > 18:
        raise Refusal("BadRequest", f"resourceVersion is a version from a list or an object, found {shown(since)}")
    limit_s = query.get("timeoutSeconds") or str(int(_LONGEST_S))
    if not limit_s.isascii() or not limit_s.isdigit() or len(limit_s) > 9:
        raise Refusal("BadRequest", f"timeoutSeconds is a whole number, found {shown(limit_s)}")
    fresh = int(since) == 0
    watching = asked.on.records.watch(kind.kind, project, None if fresh else int(since))
    first = [value for value in asked.on.records.list(kind.kind, project) if chosen.holds(value)] if fresh else []
    as_table = wants_table(asked.request.headers.get("accept", ""))
    include = query.get("includeObject", "Metadata")
    marks = query.get("allowWatchBookmarks", "false").lower() in ("true", "1")
    lines = _lines(asked, kind, watching, chosen, first, as_table, include, marks, min(float(limit_s), _LONGEST_S))
    return StreamingResponse(lines, media_type="application/json;stream=watch" if not as_table else "application/json")


async def _lines(
    asked: Asked,
    kind: Kind,
    watching: Watch,
    chosen: Selection,
    first: list[Value],
    as_table: bool,
    include: str,
    marks: bool,
    limit_s: float,
) -> AsyncIterator[bytes]:
    def line(event: str, value: Value) -> bytes:
        shown_value = asked.on.boxes.shown(value) if kind.kind == "Sandbox" and event != "DELETED" else value
        meta = {"resourceVersion": value["metadata"]["resourceVersion"]}
        return (
            msgspec.json.encode({"type": event, "object": table(kind, [shown_value], meta, include) if as_table else shown_value}) + b"\n"
        )

    ends = time.monotonic() + limit_s
    try:
        for value in first:
            if asked.may_see(value):
                yield line("ADDED", value)
        while (left := ends - time.monotonic()) > 0:
            try:
                seen = await watching.next(min(_BOOKMARK_S, left))
            except Refusal as refusal:
                yield msgspec.json.encode({"type": "ERROR", "object": refusal.body()}) + b"\n"
                return
            if seen is None:
                if marks and not as_table:
                    mark = {
                        "apiVersion": kind.api_version,
                        "kind": kind.kind,
                        "metadata": {"resourceVersion": str(asked.on.records.published)},
                    }
                    yield msgspec.json.encode({"type": "BOOKMARK", "object": mark}) + b"\n"
                continue
            if (event := _event(seen, chosen)) is not None and asked.may_see(seen.value):
                yield line(event, seen.value)
    finally:
        asked.on.records.unwatch(watching)


def _event(seen: Seen, chosen: Selection) -> str | None:
    """What a change is to this selection: entering it is ADDED, leaving it DELETED."""
    inside = chosen.holds(seen.value)
    if seen.event == "DELETED" or seen.before is None:
        return seen.event if inside else None
    was = chosen.holds(seen.before)
    if inside:
        return "MODIFIED" if was else "ADDED"
    return "DELETED" if was else None
