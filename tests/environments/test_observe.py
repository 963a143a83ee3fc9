"""Output on one line: nothing the agent prints can start a new line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.environments.observe import observation_line


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("3 a.txt\n", "3 a.txt"),
        ("a\nb\n", "a ; b"),
        ("", "none"),
        ("\n\n", "none"),
        ("a \t b\r\nc", "a b ; c"),
        ("\x1b[2Jx", "\ufffd[2Jx"),
        ("a\x00b", "a\ufffdb"),
        ("\ud83d", "\ufffd"),
    ],
)
def test_examples(output, line):
    assert observation_line(output) == line


def test_a_failure_without_output_says_so():
    assert observation_line("", ok=False) == "error"
    assert observation_line("grep: no\n", ok=False) == "grep: no"


@given(st.text())
def test_one_printable_line(output):
    line = observation_line(output)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    line.encode()
