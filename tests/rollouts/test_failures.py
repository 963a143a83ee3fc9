"""Failure injection: no fault becomes a number, and the page says what was found."""

from __future__ import annotations

import failures
import pytest

FOUND: dict[str, failures.Seen] = {}


@pytest.mark.parametrize("injection", failures.INJECTIONS, ids=lambda one: f"{one.where}: {one.what}")
def test_a_fault_is_labelled_and_is_no_number(injection: failures.Injection) -> None:
    found = FOUND[f"{injection.where}: {injection.what}"] = failures.outcome(injection)
    assert (found.label, found.attempts, found.gradings) == (injection.label, injection.attempts, injection.gradings)
    assert found.in_pass_rate == found.in_training == injection.label.startswith("graded")


def test_the_page_says_what_was_found() -> None:
    rows = [(one, FOUND.get(f"{one.where}: {one.what}") or failures.outcome(one)) for one in failures.INJECTIONS]
    assert failures.DOCUMENT.read_text() == failures.document(rows)
