"""Money: prices, one ledger row per attempt, estimates and caps, in integer micro-dollars."""

from sandmill.accounts.caps import CostCap
from sandmill.accounts.estimate import Estimate, Plan, estimate
from sandmill.accounts.ledger import Activity, LedgerRow, Spend, read_ledger, spend
from sandmill.accounts.prices import PriceBook, RunPrices, TokenPrices, Usage, cost_of_hours, load_price_book, total

__all__ = [
    "Activity",
    "CostCap",
    "Estimate",
    "LedgerRow",
    "Plan",
    "PriceBook",
    "RunPrices",
    "Spend",
    "TokenPrices",
    "Usage",
    "cost_of_hours",
    "estimate",
    "load_price_book",
    "read_ledger",
    "spend",
    "total",
]
