"""Dockerfiles: what is understood, and one sentence with file and line for everything else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.errors import ConfigError
from sandmill.sandboxes.images.dockerfile import INSTRUCTIONS, json_words, parse, words


def split(text: str, **variables: str) -> list[str]:
    return words(text, variables.get, parse("FROM host\n")[0])


def test_lines_are_joined_and_counted() -> None:
    text = "# syntax=x\r\n\r\nARG A=1\nFROM host\nRUN a \\\n  # said in between\n\n  b \\\n  c\n  user app\n"
    assert [(one.line, one.name, one.text) for one in parse(text)] == [
        (3, "ARG", "A=1"),
        (4, "FROM", "host"),
        (5, "RUN", "a   b   c"),
        (10, "USER", "app"),
    ]


REFUSED = [
    ("", "there is no FROM"),
    ("RUN x\nFROM host", "f:1: RUN: only ARG may come before FROM"),
    ("FROM host\nFROM host", "f:2: FROM: a second stage is not supported"),
    ("FROM host AS x\nCOPY --from=x a b", "f:2: COPY does not support --from; it takes --chown, --chmod"),
    ("FROM host\n\nADD a b", "f:3: 'ADD' is not supported; the nearest instruction is COPY"),
    ("FROM host\nCMD x", "f:2: 'CMD' is not supported; the nearest instruction is RUN"),
    ("FROM host\nENTRYPOINT x", "the nearest instruction is RUN"),
    ("FROM host\nVOLUME /x", "the nearest instruction is WORKDIR"),
    ("FROM host\nLABEL a=b", "the nearest instruction is ENV"),
    ("FROM host\nRUNN x", "f:2: 'RUNN' is not supported; the nearest instruction is RUN"),
    ("FROM host\nWORKDR x", "the nearest instruction is WORKDIR"),
    ("FROM host\n../../etc/passwd x", "is not supported"),
    ("FROM host\nRUN", "f:2: RUN: it says nothing"),
    ("FROM host\nRUN --mount=type=secret x", "RUN does not support --mount; it takes no flags"),
    ("FROM host\nRUN cat <<EOF\nx\nEOF", "here-documents are not supported"),
    ("# escape=`\nFROM host", "f:1: the escape character can only be a backslash"),
    ("FROM host\0", "text of at most"),
    ("FROM host\nRUN x" + " " * (1 << 20), "text of at most"),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_what_is_not_understood_is_refused_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, "f")
    assert sentence in str(raised.value)
    assert str(raised.value).startswith("f:")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ('A="b c" d', ["A=b c", "d"]),
        ("'$X' \"$X\" $X ${X}y", ["$X", "value", "value", "valuey"]),
        (r"\$X a\ b \"q\" 'a\b'", ["$X", "a b", '"q"', r"a\b"]),
        ("${N:-else} ${X:-else} ${N:+then}. ${X:+then}", ["else", "value", ".", "then"]),
        ('"" $N', ["", ""]),
    ],
)
def test_words(text: str, meant: list[str]) -> None:
    assert split(text, X="value") == meant


@pytest.mark.parametrize("text", ["'a", '"a', "${X", "${X:?no}", "${}", "$1 ", "a $"])
def test_words_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="Dockerfile:1: FROM"):
        split(text)


def test_values_are_not_replaced_again() -> None:
    assert split("$X", X="$Y ${Z} 'q'") == ["$Y ${Z} 'q'"]


def test_the_list_form() -> None:
    assert json_words('["a", "b c"]') == ["a", "b c"]
    for text in ("[]", "[1]", "[a]", "a", '["a"', "[" * 100_000, '{"a": 1}'):
        assert json_words(text) is None


@given(st.text(alphabet=" \t\n\\#\"'$-=<[]aRUNFROMCOPYhost", max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        found = parse("FROM host\n" + text)
    except ConfigError:
        return
    assert {one.name for one in found} <= set(INSTRUCTIONS)
    for one in found:
        with contextlib.suppress(ConfigError):
            assert all(isinstance(word, str) for word in words(one.text, {}.get, one))
