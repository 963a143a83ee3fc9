"""Usage, summed. In: usage records and keys to group them by. Out: one row a group, amounts in exact dollars."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from sandmill.config.quantities import parse_duration, parse_usd
from sandmill.errors import ConfigError
from sandmill.server.costs import usd
from sandmill.server.kinds import API_VERSION
from sandmill.server.records import Value, seconds_of
from sandmill.server.refusals import Refusal
from sandmill.server.schema import nearest, shown

KEYS: Final = ("project", "kind", "meter", "segment", "offering", "day")
_DAY_S: Final = 86_400


def within(values: list[Value], query: Mapping[str, str]) -> list[Value]:
    """Records that began in the range `since` to `until`: times, or durations back from now."""
    since, until = _moment(query, "since", 0.0), _moment(query, "until", float("inf"))
    return [value for value in values if since <= seconds_of(value["startTime"]) <= until]


def summary(values: list[Value], keys: str, version: int) -> dict[str, Any]:
    """A UsageSummary. An amount that is unknown for one record of a group is unknown for the group."""
    wanted = [key for key in keys.split(",") if key]
    for key in wanted:
        if key not in KEYS and not key.startswith("label:"):
            raise Refusal(
                "BadRequest", f"cannot group by {shown(key)}{nearest(key, list(KEYS))}; the keys are {', '.join(KEYS)} and label:NAME"
            )
    groups: dict[tuple[str, ...], list[Value]] = {}
    for value in values:
        groups.setdefault(tuple(_word(value, key) for key in wanted), []).append(value)
    rows = [_row(dict(zip(wanted, words, strict=True)), chosen) for words, chosen in sorted(groups.items())]
    return {
        "apiVersion": API_VERSION,
        "kind": "UsageSummary",
        "metadata": {"resourceVersion": str(version)},
        "groupBy": wanted,
        "rows": rows,
    }


def _row(group: dict[str, str], values: list[Value]) -> dict[str, Any]:
    row: dict[str, Any] = {"group": group, "records": len(values), "quantity": f"{sum(float(value['quantity']) for value in values):.3f}"}
    if all("amountUSD" in value for value in values):
        row["amountUSD"] = usd(sum(parse_usd(value["amountUSD"]) for value in values))
    return row


def _word(value: Value, key: str) -> str:
    if key == "kind":
        return str(value["object"]["kind"])
    if key == "day":
        return str(value["startTime"])[:10]
    if key.startswith("label:"):
        return str(value["labels"].get(key.removeprefix("label:"), ""))
    return str(value[key])


def _moment(query: Mapping[str, str], key: str, default: float) -> float:
    text = query.get(key)
    if not text:
        return default
    try:
        if text.endswith("d") and text[:-1].isascii() and text[:-1].isdigit() and len(text) < 7:
            return time.time() - int(text[:-1]) * _DAY_S
        return time.time() - parse_duration(text)
    except ConfigError:
        try:
            return seconds_of(text)
        except ValueError:
            raise Refusal(
                "BadRequest", f"{key} is a time such as 2026-11-04T00:00:00Z or a duration such as 12h or 30d, found {shown(text)}"
            ) from None
