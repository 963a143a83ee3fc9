"""A limit in micro-dollars in; whether the next piece of work may start out. A run stops before it exceeds its cap, not after.

Work is reserved at its highest expected cost before it starts and settled at its real cost when it ends, so that episodes in flight
cannot exceed the cap together.
"""

from __future__ import annotations

from sandmill.accounts.prices import RunPrices
from sandmill.config.quantities import format_usd, parse_usd
from sandmill.errors import ConfigError


class CostCap:
    """A run's `maxCostUSD`; a limit of None admits everything. Not for several threads at once."""

    def __init__(self, limit_microusd: int | None, spent_microusd: int = 0) -> None:
        self.limit_microusd = limit_microusd
        self.spent_microusd = spent_microusd
        self._reserved_microusd = 0

    @classmethod
    def of(cls, max_cost_usd: str | None, prices: RunPrices, spent_microusd: int | None = 0) -> CostCap:
        """From a manifest. Raises ConfigError when a cap is set and a price, or what was spent before, is unknown."""
        if max_cost_usd is None:
            return cls(None)
        field = "spec.maxCostUSD"
        limit = parse_usd(max_cost_usd, field=field)
        for name, price in (("machinePerHour", prices.machine_microusd_per_hour), ("sandboxPerHour", prices.sandbox_microusd_per_hour)):
            if price is None:
                raise ConfigError(
                    f"a cap cannot be held while spec.prices.{name} is unknown: set it or drop the cap", field="spec.maxCostUSD"
                )
        if spent_microusd is None:
            raise ConfigError("a cap cannot be held: earlier rows of this run's ledger have no known cost", field=field)
        return cls(limit, spent_microusd)

    @property
    def remaining_microusd(self) -> int | None:
        """What may still be reserved (never negative); None without a limit."""
        if self.limit_microusd is None:
            return None
        return max(0, self.limit_microusd - self.spent_microusd - self._reserved_microusd)

    def reserve(self, microusd: int) -> bool:
        """Sets aside the highest cost of something about to start. False: it must not start."""
        if microusd < 0:
            raise ValueError(f"a reservation cannot be negative: {microusd}")
        if self.remaining_microusd is not None and microusd > self.remaining_microusd:
            return False
        self._reserved_microusd += microusd
        return True

    def settle(self, reserved_microusd: int, cost_microusd: int) -> None:
        """Replaces a reservation by the real cost."""
        if not 0 <= reserved_microusd <= self._reserved_microusd or cost_microusd < 0:
            raise ValueError(f"nothing like this is reserved: {reserved_microusd} of {self._reserved_microusd}, cost {cost_microusd}")
        self._reserved_microusd -= reserved_microusd
        self.spent_microusd += cost_microusd

    def reason(self) -> str:
        """One sentence for the end of a run that the cap stopped."""
        spent, limit = format_usd(self.spent_microusd), format_usd(self.limit_microusd)
        return f"stopped at {spent}: the next step could exceed the cap of {limit}; raise spec.maxCostUSD and resume"
