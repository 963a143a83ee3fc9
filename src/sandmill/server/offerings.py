"""What this server sells, and for how much. In: a price book. Out: Offering objects, rewritten at every start."""

from __future__ import annotations

import os
from typing import Any

from sandmill.accounts.prices import PriceBook
from sandmill.server.costs import MACHINE, SANDBOX, usd
from sandmill.server.records import Records, fresh, now


def publish(records: Records, prices: PriceBook) -> None:
    """Makes the stored offerings those of the price book."""
    for value in records.list("Offering"):
        if value["metadata"]["name"] not in prices.hours:
            records.remove("Offering", "", value["metadata"]["name"])
    for name, microusd_per_hour in prices.hours.items():
        before = records.get("Offering", "", name)
        value = fresh("Offering", name, None, _spec(name)) if before is None else {**before, "spec": _spec(name)}
        here = name in (SANDBOX, MACHINE)
        value["status"] = {
            "availability": "Available" if here else "Unavailable",
            "availableNow": 1 if here else 0,
            "listPriceUSDPerHour": usd(microusd_per_hour),
            "observedTime": now() if before is None else before["status"]["observedTime"],
            "priceUSDPerHour": {"from": usd(microusd_per_hour), "typical": usd(microusd_per_hour)},
        }
        if before != value:
            records.put("Offering", "", value)


def _spec(name: str) -> dict[str, Any]:
    here = name in (SANDBOX, MACHINE)
    spec: dict[str, Any] = {
        "category": "CPU" if here else "GPU",
        "count": 0 if here else 1,
        "host": {"cpu": "1", "memory": "2Gi"}
        if name == SANDBOX
        else {"cpu": str(os.cpu_count() or 1)}
        if here
        else {"cpu": "0", "memory": "0"},
        "interruptible": False,
        "multiNode": False,
        "regionClass": "local",
        "supports": {"gangs": False, "jobs": name == MACHINE, "restrictedEgress": here, "sandboxes": name == SANDBOX, "workspaces": False},
    }
    if here:
        spec["machine"] = {"cpu": str(os.cpu_count() or 1)}
    return spec
