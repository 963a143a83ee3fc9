"""What a call of the published client is, and the two ways in which the lists of them are written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

NODUS = str(Path(sys.executable).parent / "nodus")
Work = dict[str, Any]


class Call(NamedTuple):
    """One call: how it is written, what runs it, and, where this server refuses it, with which reason and why."""

    part: str
    title: str
    run: Callable[[Work], None]
    refused: str = ""
    why: str = ""


CALLS: list[Call] = []


def sdk(title: str, refused: str = "", why: str = "") -> Callable[[Callable[[Work], None]], Callable[[Work], None]]:
    def keep(run: Callable[[Work], None]) -> Callable[[Work], None]:
        CALLS.append(Call("Python SDK", title, run, refused, why))
        return run

    return keep


class Refused(Exception):
    """The server said no, with a reason."""


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
