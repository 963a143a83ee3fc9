"""What a package returned in; JSON that says exactly that, or the reason why it cannot be said, out. Runs beside the package.

Standard library only. Nothing is guessed: a text is no number, and neither is NaN.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from typing import Any

_LONGEST_REASON = 400
_OURS = (__file__, os.path.join(os.path.dirname(__file__), "worker.py"))


class Unsound(Exception):
    """What a package returned is nothing that can be passed on."""


def score(returned: Any, what: str) -> dict[str, Any]:
    """A grader's number, or its mapping with `reward` and, besides, `parts` and `passed`. Raises Unsound."""
    if not isinstance(returned, dict):
        return {"reward": number(returned, "the reward")}
    if "reward" not in returned:
        raise Unsound(f"the reward is missing from {shown(returned)}")
    found: dict[str, Any] = {"reward": number(returned["reward"], "the reward")}
    found["parts"] = {str(name): number(part, f"part {name!a}") for name, part in dict(returned.get("parts") or {}).items()}
    if returned.get("passed") is not None:
        found["passed"] = bool(returned["passed"])
    found["answered"] = bool(returned.get("answered", True))
    return found


def number(value: Any, what: str) -> float:
    """A finite float from a number, a truth value or an array of one number. Raises Unsound for everything else, text included."""
    if hasattr(value, "item") and not isinstance(value, (int, float, str, bytes, dict, list, tuple)):
        try:
            value = value.item()
        except Exception as error:
            raise Unsound(f"{what} is {shown(value)}, not one number") from error
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Unsound(f"{what} is {shown(value)}, not a finite number")
    return float(value)


def plain(value: Any, what: str) -> Any:
    """`value` as JSON can carry it: tuples and sets as lists, keys as text, numbers out of arrays, times as text. Raises Unsound."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, dict):
        return {str(key): plain(inner, what) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, what) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(inner, what) for inner in value), key=str)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), what)
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(), what)
    raise Unsound(f"{what} holds {shown(value)}, which is neither text, number, list nor mapping")


def shown(value: Any) -> str:
    """Short and printable, whatever its own `repr` does."""
    try:
        text = ascii(value)
    except Exception:  # noqa: BLE001 - it is somebody else's
        text = "something that cannot be shown"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def encode(value: Any) -> bytes:
    """JSON in UTF-8; lone surrogates become question marks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def failure(cause: str, error: BaseException) -> bytes:
    """The body of a FAILED frame: what was raised, and in which line."""
    if isinstance(error, SystemExit):
        said = f"it called exit({error.code!a})"
    elif isinstance(error, Unsound):
        said = str(error)
    else:
        try:
            said = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - it is somebody else's
            said = type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(("<frozen", *_OURS))]
    known = isinstance(error, SyntaxError)  # its own words say where
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames and not known else ""
    return encode({"cause": cause, "reason": said[:_LONGEST_REASON] + place})
