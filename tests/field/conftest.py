"""Marks of these tests: `case(number, ...)` names rows of the field cases, `pattern(number)` one of the patterns behind them all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("rollouts", "server")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(*numbers): the field cases that the test shows")
    config.addinivalue_line("markers", "pattern(number): the pattern of field cases that the test shows")
