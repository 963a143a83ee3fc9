"""Which field cases are shown, and that the document says the same."""

from __future__ import annotations

import field_cases as cases
import pytest


@pytest.mark.pattern(0)
def test_every_test_says_what_it_shows() -> None:
    assert [f"{test.file}::{test.name}" for test in cases.tests() if not test.cases and test.pattern is None] == []


@pytest.mark.pattern(0)
def test_every_case_is_shown_or_belongs_to_what_does_not_exist_yet() -> None:
    shown = set(cases.shown())
    assert shown | set(cases.NOT_YET) == set(cases.SYMPTOMS)
    assert not shown & set(cases.NOT_YET)


@pytest.mark.pattern(0)
def test_the_document_is_what_the_tests_say() -> None:
    assert cases.DOCUMENT.read_text() == cases.document(), "run: python tests/field/field_cases.py"
