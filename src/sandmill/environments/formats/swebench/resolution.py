"""What tests came to in; whether an issue is resolved out. The rules of SWE-bench, read so that nothing missing ever counts as passed.

A test that has to pass passes as PASSED or XFAIL; a regression test may also be SKIPPED. A test that is not there has failed. Rows of
`fail_only` list what their runner prints for failures alone: there a test fails when it is FAILED.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from sandmill.environments.verifying.sessions import Session

END: Final = ">>>>> End Test Output"
MISSING: Final = "MISSING"
_EXIT_CODE: Final = re.compile(r">>>>> Test Exit Code:\s*(-?\d{1,6})")
_RAN: Final = re.compile(r"\b[1-9]\d* (?:of \d+|passing|passed|pass|specs?|tests?|SUCCESS|total)\b|^# tests [1-9]|': ok$", re.MULTILINE)
_PASSING: Final = frozenset({"PASSED", "XFAIL"})
_MAINTAINED: Final = _PASSING | {"SKIPPED"}


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """Fractions of the two lists that hold, and whether both hold entirely."""

    resolved: bool
    fail_to_pass: float
    pass_to_pass: float


def resolve(status: Mapping[str, str], fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], *, fail_only: bool = False) -> Resolution:
    """By the status of every test."""
    if fail_only:
        fixed = [status.get(test) != "FAILED" for test in fail_to_pass]
        kept = [status.get(test) != "FAILED" for test in pass_to_pass]
    else:
        fixed = [status_of(test, status) in _PASSING for test in fail_to_pass]
        kept = [status_of(test, status) in _MAINTAINED for test in pass_to_pass]
    return Resolution(resolved=bool(fixed) and all(fixed) and all(kept), fail_to_pass=_share(fixed), pass_to_pass=_share(kept))


def status_of(test: str, status: Mapping[str, str]) -> str | None:
    """A test's status; one whose name was cut in the middle of its parameters has that of those it may be, where they agree."""
    if test in status:
        return status[test]
    if test.count("[") > test.count("]"):
        fitting = [word for name, word in status.items() if name.startswith(test)]
        if fitting and len({word in _PASSING for word in fitting}) == 1:
            return fitting[0]
    return None


def confirmed(status: Mapping[str, str], sessions: Iterable[Session], *, pytest: bool = False) -> dict[str, str]:
    """The log's word for each test, as far as pytest's own record bears it out: a program can print what it likes.

    Without a record the log stands alone, unless `pytest` says that there had to be one. Names in logs end at the first space, and may
    begin at another folder than the record's.
    """
    sessions = tuple(sessions)
    if not sessions and not pytest:
        return dict(status)
    recorded: dict[str, list[str]] = {}
    for session in sessions:
        for name in (*session.collected, *session.outcomes):
            outcome = session.outcomes.get(name)
            short = name.split()[0] if name.split() else name
            for key in {name, short, *_tails(short)}:
                recorded.setdefault(key, []).append("ERROR" if outcome is None else outcome.value)
    return {name: _borne_out(name, word, recorded) for name, word in status.items()}


def _borne_out(name: str, word: str, recorded: Mapping[str, Sequence[str]]) -> str:
    if word not in _MAINTAINED:
        return word
    words = next((recorded[key] for key in (name, *_tails(name)) if key in recorded), ())
    return next((one for one in words if one not in _MAINTAINED), word) if words else MISSING


def _tails(name: str) -> list[str]:
    """The name without its first folders, one after the other, down to the file's."""
    folders, colons, rest = name.partition("::")
    parts = folders.split("/")
    return ["/".join(parts[start:]) + colons + rest for start in range(1, len(parts))] if colons else []


def contradicted(log: str, status: Mapping[str, str], *, fail_only: bool) -> str | None:
    """Why a log does not describe a run of the tests, or None. Where only failures are listed, an empty list proves nothing by itself."""
    code = _EXIT_CODE.search(log)
    failed = any(word in ("FAILED", "ERROR") for word in status.values())
    if code is not None and int(code[1]) != 0 and status and not failed:
        return f"the tests ended with {code[1]} and list no failure"
    if fail_only and not status and (END not in log or not _RAN.search(log)):
        return "nothing shows that a test ran"
    return None


def _share(held: Sequence[bool]) -> float:
    return sum(held) / len(held) if held else 1.0
