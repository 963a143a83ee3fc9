"""What a verifier wrote in; its rewards out, or the reason why there are none. Nothing but finite numbers is ever a reward."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from sandmill.errors import GraderFailed

LARGEST_BYTES: Final = 64 << 10
_MOST_NAMES: Final = 100
SCALAR: Final = "reward"
"""The name of the one number, where there is one."""
Rewards = Mapping[str, float]


def parse(as_json: bytes | None, as_text: bytes | None) -> dict[str, float]:
    """Rewards by name, from reward.json where there is one, else from reward.txt. Raises GraderFailed."""
    if as_json is not None:
        return _parse_json(as_json)
    if as_text is not None:
        return {SCALAR: _number(_decoded(as_text, "reward.txt").strip(), "reward.txt")}
    raise GraderFailed("the verifier wrote neither reward.json nor reward.txt")


def scalar(rewards: Rewards) -> float:
    """The one number that is trained on: `reward`, or the mean of all names where none is called so."""
    return rewards[SCALAR] if SCALAR in rewards else math.fsum(rewards.values()) / len(rewards)


def combined(steps: Sequence[Rewards], wanted: int, strategy: str) -> dict[str, float]:
    """Of a task of `wanted` steps of which some were verified: the mean by name, a step that is missing counting 0; or the last one's."""
    if strategy == "final":
        return dict(steps[-1]) if len(steps) == wanted else dict.fromkeys(steps[-1], 0.0)
    names = dict.fromkeys(name for rewards in steps for name in rewards)
    return {name: math.fsum(rewards.get(name, 0.0) for rewards in steps) / wanted for name in names}


def _parse_json(data: bytes) -> dict[str, float]:
    text = _decoded(data, "reward.json")
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GraderFailed(f"reward.json is no JSON: {error}") from None
    if not isinstance(found, dict) or not found or len(found) > _MOST_NAMES:
        raise GraderFailed(f"reward.json must be an object of one to {_MOST_NAMES} numbers by name, not {ascii(found)[:80]}")
    return {name: _finite(value, f"reward.json: {name!a}") for name, value in found.items()}


def _decoded(data: bytes, file: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeError:
        raise GraderFailed(f"{file} is no text") from None
    if not text.strip():
        raise GraderFailed(f"{file} is empty")
    return text


def _number(text: str, place: str) -> float:
    try:
        if "_" in text or not text.isascii():
            raise ValueError
        value = float(text)
    except ValueError:
        raise GraderFailed(f"{place} holds {ascii(text)[:80]}, which is no number") from None
    return _finite(value, place)


def _finite(value: object, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraderFailed(f"{place} is {ascii(value)[:80]}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise GraderFailed(f"{place} is {ascii(value)[:80]}, which is not finite")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
