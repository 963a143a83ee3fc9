"""Amounts as people write them ("5m", "2Gi", "500m", "12.50") in; seconds, bytes, cores and micro-dollars out.

Strict: a unit is never guessed. Every refusal is a ConfigError of one sentence that shows what was found and the nearest valid
spelling. Durations follow Go's `time.ParseDuration`, sizes and cpu follow Kubernetes quantities, money is US dollars.
"""

from __future__ import annotations

import difflib
import math
import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import NoReturn

from sandmill.errors import ConfigError

MICROUSD_PER_USD = 1_000_000
LONGEST_S = 10 * 366 * 24 * 3600.0
"""Ten years: anything longer is a slip of the unit."""
LARGEST_BYTES = 2**60
MOST_CORES = 4096
MOST_MICROUSD = 10**15
"""A thousand million dollars: anything larger is a slip."""

_DURATION_UNITS: dict[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_DURATION_SLIPS = {"min": "m", "mins": "m", "minute": "m", "minutes": "m", "sec": "s", "secs": "s", "second": "s", "seconds": "s"}
_DURATION_SLIPS |= {"hr": "h", "hrs": "h", "hour": "h", "hours": "h", "msec": "ms", "M": "m", "S": "s", "H": "h"}

_SIZE_UNITS: dict[str, int] = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SIZE_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SIZE_SLIPS = {"K": "k", "KB": "k", "kB": "k", "kb": "k", "MB": "M", "mb": "M", "GB": "G", "gb": "G", "g": "G", "TB": "T", "t": "T"}
_SIZE_SLIPS |= {"KiB": "Ki", "ki": "Ki", "MiB": "Mi", "mi": "Mi", "mib": "Mi", "GiB": "Gi", "gi": "Gi", "gib": "Gi", "TiB": "Ti", "B": ""}

_NUMBER = r"(?:[0-9]{1,24}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})"
_PART = re.compile(rf"({_NUMBER})([a-zA-Zµ]+)")
_AMOUNT = re.compile(rf"({_NUMBER})([a-zA-Z]*)")


def parse_duration(value: str | int | float, *, field: str | None = None) -> float:
    """Seconds (>= 0) of a Go duration such as "300ms", "5m" or "1h30m"; a number is taken as seconds. Raises ConfigError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _in_range(float(value), LONGEST_S, f"{value!r} is not a duration in seconds between 0 and ten years", field)
    if not isinstance(value, str):
        _refuse(f'expected a duration such as "5m", found {_shown(value)}', field)
    if value == "0":
        return 0.0
    total, position = Fraction(0), 0
    for match in _PART.finditer(value):
        if match.start() != position:
            break
        position = match.end()
        unit = match.group(2)
        if unit not in _DURATION_UNITS:
            near = _nearest(unit, _DURATION_UNITS, _DURATION_SLIPS)
            hint = f"{match.group(1)}{near}" if near is not None else "5m"
            _refuse(f'{_shown(value)} is not a duration: no unit {_shown(unit)} (ns, us, ms, s, m, h); write "{hint}"', field)
        total += Fraction(match.group(1)) * _DURATION_UNITS[unit]
    if position == 0 or position != len(value):
        hint = f"{value}s" if re.fullmatch(_NUMBER, value) else "5m"
        _refuse(f'{_shown(value)} is not a duration: write a number with a unit (ns, us, ms, s, m, h), such as "{hint}"', field)
    return _in_range(float(total), LONGEST_S, f"{_shown(value)} is longer than ten years", field)


def parse_bytes(value: str | int, *, field: str | None = None) -> int:
    """Bytes (>= 0, rounded up) of a Kubernetes quantity such as "512Mi", "2Gi", "1G" or "4096". Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(_in_range(value, LARGEST_BYTES, f"{value} is not a size in bytes between 0 and 1 EiB", field))
    if not isinstance(value, str):
        _refuse(f'expected a size such as "512Mi", found {_shown(value)}', field)
    match = _AMOUNT.fullmatch(value)
    if match is None:
        _refuse(f'{_shown(value)} is not a size: write a number and one of k, M, G, T, Ki, Mi, Gi, Ti, such as "512Mi"', field)
    number, unit = match.groups()
    if unit not in _SIZE_UNITS:
        near = _nearest(unit, _SIZE_UNITS, _SIZE_SLIPS)
        hint = f"{number}{near}" if near is not None else "512Mi"
        _refuse(f'{_shown(value)} is not a size: no unit {_shown(unit)} (k, M, G, T, Ki, Mi, Gi, Ti); write "{hint}"', field)
    size = math.ceil(Fraction(number) * _SIZE_UNITS[unit])
    return int(_in_range(size, LARGEST_BYTES, f"{_shown(value)} is more than 1 EiB", field))


def parse_cpu(value: str | int | float, *, field: str | None = None) -> float:
    """Cores (> 0) of a Kubernetes cpu quantity such as "500m", "1" or 0.5. Raises ConfigError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        cores = float(value)
    elif isinstance(value, str) and (match := re.fullmatch(rf"({_NUMBER})(m?)", value)):
        cores = float(Fraction(match.group(1)) / (1000 if match.group(2) else 1))
    else:
        _refuse(f'{_shown(value)} is not an amount of cpu: write cores such as "1" or "0.5", or thousandths such as "500m"', field)
    if not (math.isfinite(cores) and 0 < cores <= MOST_CORES):
        _refuse(f"{_shown(value)} is not an amount of cpu between 0 (excluded) and {MOST_CORES} cores", field)
    return cores


def parse_usd(value: str | int | float | Decimal, *, field: str | None = None) -> int:
    """Micro-dollars (>= 0) of an amount of US dollars such as "12.50". Raises ConfigError, also for fractions of a micro-dollar."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        _refuse(f'expected US dollars such as "12.50", found {_shown(value)}', field)
    text = repr(value) if isinstance(value, float) else str(value)
    if isinstance(value, str) and re.fullmatch(_NUMBER, value) is None:
        bare = value.strip().removeprefix("$").removesuffix("USD").replace(",", "").replace("_", "").strip()
        hint = bare if re.fullmatch(_NUMBER, bare) else "12.50"
        _refuse(f'{_shown(value)} is not an amount of US dollars: write digits only, such as "{hint}"', field)
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount < 0 or amount > MOST_MICROUSD // MICROUSD_PER_USD:
        _refuse(f"{_shown(value)} is not an amount of US dollars between 0 and {MOST_MICROUSD // MICROUSD_PER_USD:,}", field)
    exact = Fraction(amount) * MICROUSD_PER_USD
    if exact.denominator != 1:
        _refuse(f'{_shown(value)} is finer than a micro-dollar: write at most six decimals, such as "{round(amount, 6)}"', field)
    return int(exact)


def format_usd(amount_microusd: int | None, *, decimals: int = 2) -> str:
    """Dollars for people, rounded half up on exact integers ("$346.37"); None is "unknown", never "$0.00"."""
    if amount_microusd is None:
        return "unknown"
    scale = 10 ** (6 - decimals)
    units, sign = (abs(amount_microusd) + scale // 2) // scale, "-" if amount_microusd < 0 else ""
    whole, part = divmod(units, 10**decimals)
    return f"{sign}${whole:,}" + (f".{part:0{decimals}d}" if decimals else "")


def _nearest(unit: str, known: dict[str, Fraction] | dict[str, int], slips: dict[str, str]) -> str | None:
    if unit in slips:
        return slips[unit]
    near = difflib.get_close_matches(unit, [name for name in known if name], n=1, cutoff=0.5)
    return near[0] if near else None


def _in_range(value: float, most: float, complaint: str, field: str | None) -> float:
    if not (math.isfinite(value) and 0 <= value <= most):
        _refuse(complaint, field)
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(sentence: str, field: str | None) -> NoReturn:
    raise ConfigError(sentence, field=field)
