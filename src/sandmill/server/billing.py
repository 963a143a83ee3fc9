"""Usage records: one a run of a sandbox, failures included. In: runs as they end. Out: records, the newest in full, older ones summed.

At most `KEPT_RECORDS` are kept one by one. Beyond that the oldest are folded into one record a project, day and set of labels, whose
amount is their exact sum: what was spent is never forgotten, only which sandbox it was.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any, Final

import msgspec

from sandmill.config.quantities import parse_usd
from sandmill.server.costs import SANDBOX, Meter, usd
from sandmill.server.records import Records, Value, fine_stamp, fresh

KEPT_RECORDS: Final = 20_000
_FOLDED_AT_ONCE: Final = 500


class Billing:
    """The server's usage records."""

    def __init__(self, records: Records, kept: int = KEPT_RECORDS) -> None:
        self._records = records
        self._most = kept
        single = [value for value in records.list("UsageRecord") if "folded" not in value]
        self._names = deque(
            value["metadata"]["name"] for value in sorted(single, key=lambda value: int(value["metadata"]["resourceVersion"]))
        )

    def run(self, box: Value, meter: Meter, began_s: float, seconds: float) -> None:
        """One run has ended."""
        total = meter.total(seconds)
        meta = box["metadata"]
        record = fresh("UsageRecord", self._records.free_name("UsageRecord", "", f"{meta['name']}-"), None)
        record |= {
            "object": {"kind": "Sandbox", "name": meta["name"], "uid": meta["uid"]},
            "project": meta["namespace"],
            "labels": meta.get("labels", {}),
            "meter": "ComputeSeconds",
            "segment": "Running",
            "offering": SANDBOX,
            "quantity": f"{seconds:.3f}",
            "unit": "s",
            "startTime": fine_stamp(began_s),
            "endTime": fine_stamp(began_s + seconds),
        }
        if total is not None:
            record["amountUSD"] = usd(total - meter.before_microusd)
        if meter.rate_microusd_per_hour is not None:
            record["rateUSDPerHour"] = usd(meter.rate_microusd_per_hour)
        self._records.put("UsageRecord", "", record)
        self._names.append(record["metadata"]["name"])
        if len(self._names) > self._most + _FOLDED_AT_ONCE:
            self._fold()

    def _fold(self) -> None:
        """The oldest become sums, in one transaction a group, so that a crash counts nothing twice."""
        groups: dict[str, list[Value]] = {}
        for _ in range(len(self._names) - self._most):
            value = self._records.get("UsageRecord", "", self._names.popleft())
            if value is not None:
                groups.setdefault(_place(value), []).append(value)
        for name, values in groups.items():
            before = self._records.get("UsageRecord", "", name)
            parts = values if before is None else [before, *values]
            into = {**(before or fresh("UsageRecord", name, None)), **_sum(parts)}
            self._records.fold("UsageRecord", "", [value["metadata"]["name"] for value in values], into)


def _place(value: Value) -> str:
    """The name of the sum a record belongs to: amounts that are known and unknown are not mixed."""
    key = msgspec.json.encode([value["labels"], "amountUSD" in value], order="sorted")
    return f"folded-{value['project']}-{value['startTime'][:10]}-{hashlib.sha256(key).hexdigest()[:8]}"


def _sum(values: list[Value]) -> dict[str, Any]:
    first = values[0]
    out: dict[str, Any] = {key: first[key] for key in ("project", "labels", "meter", "segment", "offering", "unit")}
    out |= {
        "object": {"kind": "Sandbox", "name": "", "uid": ""},
        "folded": sum(value.get("folded", 1) for value in values),
        "quantity": f"{sum(float(value['quantity']) for value in values):.3f}",
        "startTime": min(value["startTime"] for value in values),
        "endTime": max(value["endTime"] for value in values),
    }
    if "amountUSD" in first:
        out["amountUSD"] = usd(sum(parse_usd(value["amountUSD"]) for value in values))
    return out
