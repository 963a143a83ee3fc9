"""Objects as a table, for command lines. In: objects and a kind's columns. Out: `meta.k8s.io/v1` Table objects."""

from __future__ import annotations

import time
from typing import Any, Final

from sandmill.reports.inert import inert
from sandmill.server.kinds import Column, Kind, at_path
from sandmill.server.records import Value, seconds_of

_WIDEST: Final = 200
_STEPS: Final = ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def wants_table(accept: str) -> bool:
    """Whether an Accept header asks for a table first."""
    return "as=Table" in accept.split(",")[0] and "g=meta.k8s.io" in accept.split(",")[0]


def table(kind: Kind, values: list[Value], meta: dict[str, Any], include: str) -> dict[str, Any]:
    """A table of objects; `include` is Metadata (the default), Object or None."""
    columns = [Column("Name", "metadata.name"), *kind.columns]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": meta,
        "columnDefinitions": [
            {
                "name": column.name,
                "type": "string" if column.type == "date" else column.type,
                "format": "name" if column.name == "Name" else "",
                "description": column.path,
                "priority": 1 if column.wide else 0,
            }
            for column in columns
        ],
        "rows": [{"cells": [_cell(column, value) for column in columns], "object": _object(value, include)} for value in values],
    }


def _object(value: Value, include: str) -> Any:
    if include == "Object":
        return value
    if include == "None":
        return None
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": value["metadata"]}


def _cell(column: Column, value: Value) -> Any:
    found = at_path(value, column.path)
    if found is None:
        return "" if column.type != "integer" else None
    if column.type == "date":
        return age(str(found))
    if isinstance(found, int) and column.type == "integer":
        return found
    words = " ".join(map(str, found)) if isinstance(found, list) else str(found)
    return inert(words, limit=_WIDEST)  # command lines print cells as they are


def age(moment: str) -> str:
    """How long ago, in the two largest units at most."""
    seconds = max(0, int(time.time() - seconds_of(moment)))
    for place, (size, unit) in enumerate(_STEPS):
        if seconds >= size or unit == "s":
            rest = seconds % size
            finer = _STEPS[place + 1] if place + 1 < len(_STEPS) and seconds < 10 * size else None
            return f"{seconds // size}{unit}" + (f"{rest // finer[0]}{finer[1]}" if finer and rest >= finer[0] else "")
    return "0s"
