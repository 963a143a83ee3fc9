"""Prices in, integer micro-dollars out; an unknown price makes an unknown cost (None), never zero.

All arithmetic is on integers and exact fractions. One rounding happens, at the end, half to even, to a micro-dollar.
"""

from __future__ import annotations

import difflib
import importlib.resources
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sandmill.config.manifest import PricesSection
from sandmill.config.quantities import parse_usd
from sandmill.errors import ConfigError, plainly

SECONDS_PER_HOUR = 3600
TOKENS_PER_PRICE = 1_000_000


def cost_of_hours(microusd_per_hour: int | None, seconds: float | Fraction, count: int = 1) -> int | None:
    """Micro-dollars of `count` things for `seconds` each, rounded half to even. No time costs nothing; a price of None is unknown."""
    if not math.isfinite(seconds) or seconds < 0 or count < 0:
        raise ValueError(f"seconds and counts must be finite and not negative, not {seconds} and {count}")
    if seconds == 0 or count == 0:
        return 0
    if microusd_per_hour is None:
        return None
    return round(Fraction(seconds) * microusd_per_hour * count / SECONDS_PER_HOUR)


def total(costs: tuple[int | None, ...]) -> int | None:
    """The sum, or None where any part is unknown."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model call, each counted in exactly one bucket."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    thinking: int = 0

    def __post_init__(self) -> None:
        for bucket, count in msgspec.structs.asdict(self).items():
            if count < 0:
                raise ValueError(f"a count of tokens cannot be negative: {bucket} {count}")


class TokenPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-dollars per million tokens, by bucket; None is unknown."""

    input: int | None = None
    output: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    thinking: int | None = None

    def cost(self, usage: Usage) -> int | None:
        """Micro-dollars, rounded half to even; None when a bucket that was used has no price."""
        exact = Fraction(0)
        for bucket, count in msgspec.structs.asdict(usage).items():
            price = getattr(self, bucket)
            if count and price is None:
                return None
            exact += Fraction(count * (price or 0), TOKENS_PER_PRICE)
        return round(exact)


class PriceBook(msgspec.Struct, frozen=True, kw_only=True):
    """Known prices by name: hours of machines and sandboxes, tokens of models."""

    hours: Mapping[str, int] = {}
    """Micro-dollars per hour."""
    tokens: Mapping[str, TokenPrices] = {}

    def per_hour(self, name: str) -> int | None:
        """Micro-dollars per hour, or None where the name is unknown."""
        return self.hours.get(name)

    def token_cost(self, model: str, usage: Usage) -> int | None:
        """Micro-dollars of a model call, or None where the model or a bucket it used has no price."""
        prices = self.tokens.get(model)
        return None if prices is None else prices.cost(usage)


def load_price_book(path: Path | None = None) -> PriceBook:
    """Reads a price book; None reads the list prices that come with the package. Raises ConfigError with file and field."""
    if path is None:
        text, shown = importlib.resources.files("sandmill.accounts").joinpath("prices.yaml").read_text("utf-8"), "prices.yaml"
    else:
        try:
            text, shown = path.read_text("utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the price book cannot be read: {plainly(error)}", file=path) from error
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError("the price book is not YAML", file=shown, line=None if mark is None else mark.line + 1) from error
    try:
        return _book(content)
    except ConfigError as error:
        raise ConfigError(error.message, file=shown, field=error.field) from error


def _book(content: Any) -> PriceBook:
    content = _mapping(content, ("hours", "tokens"), "the price book")
    hours = {str(name): _price(value, f"hours.{name}") for name, value in _mapping(content.get("hours"), None, "hours").items()}
    tokens: dict[str, TokenPrices] = {}
    buckets = tuple(field.name for field in msgspec.structs.fields(TokenPrices))
    for model, prices in _mapping(content.get("tokens"), None, "tokens").items():
        given = _mapping(prices, buckets, f"tokens.{model}")
        tokens[str(model)] = TokenPrices(**{bucket: _price(value, f"tokens.{model}.{bucket}") for bucket, value in given.items()})
    return PriceBook(hours=hours, tokens=tokens)


def _mapping(value: Any, known: tuple[str, ...] | None, field: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected names with prices, found {value!a}", field=field)
    for key in value:
        if known is not None and key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key {key!a}; did you mean {near!r}?", field=field)
    return value


def _price(value: Any, field: str) -> int:
    if not isinstance(value, str):
        raise ConfigError(f'a price is written as a string of US dollars such as "2.60", found {value!a}', field=field)
    return parse_usd(value, field=field)


class RunPrices(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's machine and its sandboxes cost in micro-dollars per hour; None is unknown."""

    machine_microusd_per_hour: int | None = None
    sandbox_microusd_per_hour: int | None = None

    @classmethod
    def of(cls, section: PricesSection) -> RunPrices:
        """From a manifest. Raises ConfigError naming the field."""
        machine, sandbox = section.machine_per_hour, section.sandbox_per_hour
        return cls(
            machine_microusd_per_hour=None if machine is None else parse_usd(machine, field="spec.prices.machinePerHour"),
            sandbox_microusd_per_hour=None if sandbox is None else parse_usd(sandbox, field="spec.prices.sandboxPerHour"),
        )

    def cost(self, *, machine_s: float = 0.0, sandbox_s: float = 0.0) -> int | None:
        """Micro-dollars of machine and sandbox time; None when something that was used has no price."""
        return total((cost_of_hours(self.machine_microusd_per_hour, machine_s), cost_of_hours(self.sandbox_microusd_per_hour, sandbox_s)))
