"""Records of the `inside/sandmill_record.py` plugin in; what each test of each pytest session came to out."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping

import msgspec


class Outcome(enum.StrEnum):
    """What a test came to. An expected failure is XFAILED, a failure of its set-up or tear-down is ERROR."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAILED = "XFAIL"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One pytest session. `exit_status` is None when it did not end by itself."""

    collected: tuple[str, ...]
    outcomes: Mapping[str, Outcome]
    uncollected: tuple[str, ...]
    exit_status: int | None

    @property
    def passed(self) -> bool:
        """It ended by itself, ran something, and every test that was collected passed or was expected to fail."""
        good = (Outcome.PASSED, Outcome.XFAILED)
        return (
            self.exit_status == 0
            and bool(self.collected)
            and not self.uncollected
            and all(self.outcomes.get(test) in good for test in self.collected)
        )


def parse_sessions(record: bytes) -> tuple[Session, ...]:
    """The sessions that one file or pipe recorded, in order. Lines that are none of a record's are passed over."""
    parts: list[list[Mapping[str, object]]] = []
    for line in record.split(b"\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(found, dict):
            continue
        if "began" in found or not parts:
            parts.append([])
        parts[-1].append(found)
    return tuple(_session(lines) for lines in parts)


def _session(lines: Iterable[Mapping[str, object]]) -> Session:
    collected: tuple[str, ...] = ()
    outcomes: dict[str, Outcome] = {}
    uncollected: list[str] = []
    status: int | None = None
    for line in lines:
        match line:
            case {"collected": list(names)}:
                collected = tuple(str(name) for name in names)
            case {"uncollected": str(name)}:
                uncollected.append(name)
            case {"test": str(name), "when": str(when), "outcome": str(word)}:
                found = _outcome(outcomes.get(name), when, word, line.get("expected") is True)
                if found is not None:
                    outcomes[name] = found
            case {"finished": int(number)} if not isinstance(number, bool):
                status = number if status is None else -1
            case _:
                pass
    return Session(collected=collected, outcomes=outcomes, uncollected=tuple(uncollected), exit_status=status)


def _outcome(before: Outcome | None, when: str, word: str, expected: bool) -> Outcome | None:
    if word == "failed":
        return Outcome.FAILED if when == "call" else Outcome.ERROR
    if before is not None:
        return before
    if word == "skipped":
        return Outcome.XFAILED if expected else Outcome.SKIPPED
    return Outcome.PASSED if when == "call" and word == "passed" else None
