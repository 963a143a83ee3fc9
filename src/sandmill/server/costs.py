"""What a sandbox costs. In: a price book, a size, seconds. Out: integer micro-dollars, and dollars as the API writes them.

The list price is that of 1 vCPU with 2 GiB; other sizes are scaled by whichever of the two they use more of.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import Any, Final

import msgspec

from sandmill.accounts.prices import PriceBook, cost_of_hours
from sandmill.config.quantities import parse_bytes, parse_cpu, parse_usd

SANDBOX: Final = "sandbox"
"""The price book's name for an hour of 1 vCPU and 2 GiB."""
MACHINE: Final = "machine"
"""Its name for an hour of the server's own machine, which trains."""
_UNIT_BYTES: Final = 2 << 30


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's price and what its earlier runs cost. `rate` None: the price book has no price, so cost is unknown."""

    rate_microusd_per_hour: int | None
    limit_microusd: int | None
    before_microusd: int = 0

    def total(self, seconds: float) -> int | None:
        """After `seconds` of this run; never more than the cap, where the run ends."""
        spent = cost_of_hours(self.rate_microusd_per_hour, max(0.0, seconds))
        if spent is None:
            return None
        whole = self.before_microusd + spent
        return whole if self.limit_microusd is None else min(whole, max(self.limit_microusd, self.before_microusd))

    def seconds_left(self) -> float | None:
        """How long a run may last from its start until the cap; None: for ever."""
        if self.limit_microusd is None or not self.rate_microusd_per_hour:
            return None
        return float(Fraction(max(0, self.limit_microusd - self.before_microusd) * 3600, self.rate_microusd_per_hour))


def rate_of(prices: PriceBook, resources: dict[str, Any]) -> int | None:
    """Micro-dollars per hour of a sandbox of this size; None where the book has no price for sandboxes."""
    unit = prices.per_hour(SANDBOX)
    if unit is None:
        return None
    cpu = Fraction(str(parse_cpu(resources["cpu"])))
    return round(unit * max(cpu, Fraction(parse_bytes(resources["memory"]), _UNIT_BYTES)))


def usd(microusd: int) -> str:
    """Dollars as the API writes them: at least two decimals, at most six, nothing rounded away."""
    whole, part = divmod(microusd, 1_000_000)
    decimals = f"{part:06d}".rstrip("0")
    return f"{whole}.{decimals:0<2}"


def microusd(text: str | None) -> int:
    """Back again."""
    return 0 if text is None else parse_usd(text)


def cost_status(meter: Meter, seconds: float, *, running: bool) -> dict[str, Any]:
    """`status.cost`."""
    total = meter.total(seconds)
    out: dict[str, Any] = {"final": not running}
    if total is not None:
        out["totalUSD"] = usd(total)
    if meter.rate_microusd_per_hour is not None:
        out["rateUSDPerHour"] = usd(meter.rate_microusd_per_hour) if running else "0.00"
    if meter.limit_microusd is not None:
        out["limitUSD"] = usd(meter.limit_microusd)
        if total is not None:
            out["heldUSD"] = usd(max(0, meter.limit_microusd - total)) if running else "0.00"
    return out


def book_version(prices: PriceBook) -> str:
    """A short digest of a price book: the same for equal books."""
    return hashlib.sha256(msgspec.json.encode(prices, order="sorted")).hexdigest()[:12]
