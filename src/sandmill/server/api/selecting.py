"""Which objects a request means. In: label and field selectors as text. Out: a test for one object."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from sandmill.server.kinds import at_path
from sandmill.server.records import Value
from sandmill.server.refusals import Cause, Refusal
from sandmill.server.schema import shown

_LONGEST: Final = 4096
_LABEL: Final = r"(?:[A-Za-z0-9][-A-Za-z0-9.]*/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_WORD: Final = r"[-A-Za-z0-9_.]*"
_SET = re.compile(rf"({_LABEL})\s+(in|notin)\s+\(([^()]*)\)")
_EQUAL = re.compile(rf"({_LABEL})\s*(==|=|!=)\s*({_WORD})")
_EXISTS = re.compile(rf"(!?)\s*({_LABEL})")
_FIELD = re.compile(r"([A-Za-z][A-Za-z0-9_.]*)(==|=|!=)(.*)", re.DOTALL)


class Label(NamedTuple):
    """One requirement: the label is (or is not) one of `words`; without words, it is there (or not)."""

    key: str
    words: frozenset[str] | None
    wanted: bool

    def holds(self, labels: dict[str, str]) -> bool:
        """For an object's labels."""
        if self.words is None:
            return (self.key in labels) is self.wanted
        return (labels.get(self.key) in self.words) is self.wanted


class Field(NamedTuple):
    """One requirement: what lies at a path equals (or not) a word."""

    path: str
    word: str
    wanted: bool

    def holds(self, value: Value) -> bool:
        """For an object."""
        return (_text(at_path(value, self.path)) == self.word) is self.wanted


class Selection(NamedTuple):
    """All requirements together."""

    labels: tuple[Label, ...] = ()
    fields: tuple[Field, ...] = ()

    def holds(self, value: Value) -> bool:
        """Whether the object is meant."""
        labels = value["metadata"].get("labels", {})
        return all(label.holds(labels) for label in self.labels) and all(field.holds(value) for field in self.fields)


def selection(labels: str | None, fields: str | None) -> Selection:
    """Raises Refusal (BadRequest) for what is no selector."""
    return Selection(tuple(_labels(labels or "")), tuple(_fields(fields or "")))


def _labels(text: str) -> list[Label]:
    _check_length(text, "labelSelector")
    out: list[Label] = []
    for part in re.split(r",(?![^()]*\))", text) if text.strip() else ():
        part = part.strip()
        if (match := _SET.fullmatch(part)) is not None:
            words = frozenset(word.strip() for word in match[3].split(","))
            out.append(Label(match[1], words, match[2] == "in"))
        elif (match := _EQUAL.fullmatch(part)) is not None:
            out.append(Label(match[1], frozenset({match[3]}), match[2] != "!="))
        elif (match := _EXISTS.fullmatch(part)) is not None:
            out.append(Label(match[2], None, not match[1]))
        else:
            raise _malformed("labelSelector", part, "team=nlp, team!=nlp, team in (a,b), team or !team")
    return out


def _fields(text: str) -> list[Field]:
    _check_length(text, "fieldSelector")
    out: list[Field] = []
    for part in text.split(",") if text else ():
        if (match := _FIELD.fullmatch(part)) is None:
            raise _malformed("fieldSelector", part, "metadata.name=dev or status.phase!=Running")
        out.append(Field(match[1], match[3], match[2] != "!="))
    return out


def _check_length(text: str, field: str) -> None:
    if len(text) > _LONGEST:
        raise Refusal("BadRequest", f"{field} may have {_LONGEST} characters at most")


def _malformed(field: str, part: str, like: str) -> Refusal:
    message = f"{shown(part)} is no {field}; write {like}"
    return Refusal("BadRequest", message, causes=[Cause(field, "FieldValueInvalid", message)])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
