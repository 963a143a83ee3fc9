"""YAML text in; a tree of `Node`s out, each of which knows its file and line, with every YAML trap turned into one sentence.

Scalars follow YAML 1.2's core schema (so `4e-5` is a number, and `no`, `12:30` and `010` are not surprises). Duplicate keys,
several documents, tags, merge keys and recursive anchors are refused. Anchored nodes are shared, never copied, so an anchor
bomb costs nothing; depth, size and count are bounded before anything is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from sandmill.errors import ConfigError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24
MAX_NODES = 20_000
OPTION = "--set "
"""Starts the `file` of a node that came from the command line."""

Scalar = str | int | float | bool | None

_INT = re.compile(r"[-+]?[0-9]{1,40}")
_RADIX = re.compile(r"0x[0-9a-fA-F]{1,32}|0o[0-7]{1,40}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]{1,60}|[0-9]{1,60}(?:\.[0-9]{0,60})?)(?:[eE][-+]?[0-9]{1,5})?")
_CONSTANTS: dict[str, Scalar] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_CONSTANTS |= {".nan": math.nan, ".NaN": math.nan, ".NAN": math.nan}
_CONSTANTS |= {sign + word: float(f"{sign or '+'}inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")}


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a document: `value` is a scalar, a list of nodes or a dict of nodes; `text` is a scalar as it was written."""

    value: Scalar | list[Node] | dict[str, Node]
    text: str
    file: str
    line: int
    key_lines: dict[str, int]

    @property
    def shown_line(self) -> int | None:
        """The line to show a person; an option of the command line has none."""
        return None if self.file.startswith(OPTION) else self.line

    @property
    def found(self) -> str:
        """What a person reads after "found": the value as written, shortened."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "nothing" if not self.text else "null"
        return shortened(repr(self.value) if isinstance(self.value, str) else self.text)


def shortened(text: str, limit: int = 60) -> str:
    """`text`, cut to `limit` characters with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def parse_document(data: bytes, file: str) -> Node:
    """The root node of a YAML document. Raises ConfigError with file and line for anything that is not one plain document."""
    text = _decoded(data, file)
    try:
        return _Builder(file).document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise _syntax(error, text, file) from None


def parse_value(text: str, file: str) -> Node:
    """The node of one value, as `--set key=value` gives it; an empty text is the empty string, not null."""
    if text == "":
        return Node("", "", file, 1, {})
    return parse_document(text.encode("utf-8", "surrogatepass"), file)


class _Builder:
    """Builds nodes from parser events. Recursion is bounded by MAX_DEPTH."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._anchors: dict[str, Node | None] = {}
        self._count = 0

    def document(self, events: Iterator[yaml.Event]) -> Node:
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._refusal("holds more than one YAML document: keep one", event)
                root = self._node(next(events), events, 0)
        if root is None or (root.value is None and root.text == ""):
            raise ConfigError("is empty: a manifest starts with `spec:`", file=self._file, line=1)
        return root

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node:
        self._count += 1
        if self._count > MAX_NODES:
            raise self._refusal(f"holds more than {MAX_NODES:,} values: a manifest is short", event)
        if depth > MAX_DEPTH:
            raise self._refusal(f"is nested more than {MAX_DEPTH} levels deep", event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        node = self._build(event, events, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent) -> Node:
        name = str(event.anchor)
        if name not in self._anchors:
            raise self._refusal(f"the alias *{shortened(name)} has no anchor before it", event)
        node = self._anchors[name]
        if node is None:
            raise self._refusal(f"the anchor &{shortened(name)} contains itself", event)
        return node

    def _build(self, event: yaml.NodeEvent, events: Iterator[yaml.Event], depth: int) -> Node:
        line = _line(event)
        tag = getattr(event, "tag", None)
        if tag is not None and not (isinstance(event, yaml.ScalarEvent) and tag in ("!", "tag:yaml.org,2002:str")):
            raise self._refusal(f"the YAML tag {shortened(repr(tag))} is not allowed here: write the plain value", event)
        if isinstance(event, yaml.ScalarEvent):
            plain = tag is None and event.implicit[0] and event.style in (None, "")
            return Node(self._scalar(event) if plain else event.value, event.value, self._file, line, {})
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(inner := next(events), yaml.SequenceEndEvent):
                items.append(self._node(inner, events, depth + 1))
            return Node(items, "", self._file, line, {})
        return self._mapping(events, depth, line)

    def _mapping(self, events: Iterator[yaml.Event], depth: int, line: int) -> Node:
        entries: dict[str, Node] = {}
        key_lines: dict[str, int] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or not event.value:
                raise self._refusal("a key must be a plain word", event)
            key, key_line = event.value, _line(event)
            if key in entries:
                shown = shortened(repr(key))
                message = f"the key {shown} appears twice, first on line {key_lines[key]}: keep one of them"
                raise ConfigError(message, file=self._file, line=key_line)
            key_lines[key] = key_line
            entries[key] = self._node(next(events), events, depth + 1)
        return Node(entries, "", self._file, line, key_lines)

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        text = event.value
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INT.fullmatch(text):
            return int(text)
        if _RADIX.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            return float(text)
        return str(text)

    def _refusal(self, message: str, event: yaml.Event) -> ConfigError:
        return ConfigError(message, file=self._file, line=_line(event))


def _line(event: yaml.Event) -> int:
    return 1 if event.start_mark is None else int(event.start_mark.line) + 1


def _decoded(data: bytes, file: str) -> str:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"is larger than {MAX_BYTES // 1024} KiB: this is not a manifest", file=file, line=1)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text: it holds the byte 0x{data[error.start]:02x}; save it as UTF-8"
        raise ConfigError(message, file=file, line=line) from None
    for position, character in enumerate(text):
        if (character < " " and character not in "\t\n\r") or character == "\x7f":
            line = text.count("\n", 0, position) + 1
            raise ConfigError(f"contains the control character U+{ord(character):04X}: remove it", file=file, line=line)
    return text


def _syntax(error: yaml.YAMLError, text: str, file: str) -> ConfigError:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, int(error.position)) + 1
        return ConfigError(f"contains the character U+{int(error.character):04X}: remove it", file=file, line=line)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = 1 if mark is None else mark.line + 1
    problem = shortened(str(getattr(error, "problem", None) or "it cannot be read"), 160)
    if "'\\t'" in problem:
        problem = "a tab cannot start or indent a value: use spaces"
    return ConfigError(f"is not valid YAML: {problem}", file=file, line=line)
