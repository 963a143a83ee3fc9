"""What tests came to in; whether an issue is resolved out. The rules of SWE-bench, read so that nothing missing ever counts as passed.

A test that has to pass passes as PASSED or XFAIL; a regression test may also be SKIPPED. A test that is not there has failed. Rows of
`fail_only` list what their runner prints for failures alone: there a test fails when it is FAILED.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sandmill.environments.verifying.sessions import Session

_PASSING = frozenset({"PASSED", "XFAIL"})
_MAINTAINED = _PASSING | {"SKIPPED"}


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


def confirmed(status: Mapping[str, str], sessions: Iterable[Session]) -> dict[str, str]:
    """The log's word for each test, unless pytest's own record says something worse: a program can print what it likes.

    Names in logs end at the first space, so a name stands for every recorded test that begins with it so. Where no name of the log is
    in the record, the tests were not pytest's, and the log stands alone.
    """
    recorded: dict[str, str] = {}
    for session in sessions:
        recorded.update({name: outcome.value for name, outcome in session.outcomes.items()})
        recorded.update({name: "ERROR" for name in session.collected if name not in session.outcomes})
    by_word: dict[str, list[str]] = {}
    for name, word in recorded.items():
        by_word.setdefault(name.split()[0] if name.split() else name, []).append(word)
    if not any(name in recorded or name in by_word for name in status):
        return dict(status)
    found = {}
    for name, word in status.items():
        words = [recorded[name]] if name in recorded else by_word.get(name, [])
        bad = next((one for one in words if one not in _MAINTAINED), None)
        if word in _MAINTAINED and (not words or bad is not None):
            word = bad or "MISSING"
        found[name] = word
    return found


def _share(held: Sequence[bool]) -> float:
    return sum(held) / len(held) if held else 1.0
