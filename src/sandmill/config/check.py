"""A document's nodes and a msgspec type in; plain values that fit the type exactly out, or a ConfigError at the line at fault.

msgspec says what is wrong but not on which line, nor which key was meant; this walk over the type's own description does.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect

from sandmill.config.document import Node, shortened
from sandmill.errors import ConfigError

INT64 = 2**63

Plain = str | int | float | bool | None | list["Plain"] | dict[str, "Plain"]
"""What msgspec.convert takes."""


class Checker:
    """Checks nodes against one root struct. `raw_text` names the dotted fields whose scalars are kept as written (amounts)."""

    def __init__(self, root: type[msgspec.Struct], raw_text: frozenset[str]) -> None:
        info = inspect.type_info(root)
        assert isinstance(info, inspect.StructType)
        self._root = info
        self._raw_text = raw_text
        self._homes = _homes(info)

    def check(self, node: Node) -> Plain:
        """Plain values for msgspec.convert. Raises ConfigError with file, line and dotted field."""
        return self._value(node, self._root, "")

    def _value(self, node: Node, kind: inspect.Type, field: str) -> Plain:
        if isinstance(kind, inspect.Metadata):
            return self._value(node, kind.type, field)
        if isinstance(kind, inspect.UnionType):
            return self._union(node, kind, field)
        if isinstance(kind, inspect.StructType):
            return self._struct(node, kind, field)
        if isinstance(kind, inspect.DictType):
            return self._dict(node, kind, field)
        if isinstance(kind, inspect.VarTupleType | inspect.ListType):
            return self._list(node, kind, field)
        return self._scalar(node, kind, field)

    def _union(self, node: Node, kind: inspect.UnionType, field: str) -> Plain:
        options = [option for option in kind.types if not isinstance(option, inspect.NoneType)]
        if node.value is None and len(options) < len(kind.types):
            return None
        if len(options) == 1:
            return self._value(node, options[0], field)
        for option in options:
            if _shape_fits(node, option):
                return self._value(node, option, field)
        words = " or ".join(sorted({_expected(option) for option in options}))
        raise _refusal(node, field, f"expected {words}, found {node.found}")

    def _struct(self, node: Node, kind: inspect.StructType, field: str) -> Plain:
        known = {entry.encode_name: entry for entry in kind.fields}
        if not isinstance(node.value, dict):
            keys = ", ".join(list(known)[:6])
            raise _refusal(node, field, f"expected a mapping with keys such as {keys}, found {node.found}")
        plain: dict[str, Plain] = {}
        for key, child in node.value.items():
            inner = f"{field}.{key}" if field else key
            if key not in known:
                raise self._unknown(node, child, key, known, field)
            plain[key] = self._value(child, known[key].type, inner)
        for key, entry in known.items():
            if entry.required and key not in plain:
                raise _refusal(node, field, f"the key {key!r} is missing{_example(key)}")
        return plain

    def _unknown(self, node: Node, child: Node, key: str, known: Iterable[str], field: str) -> ConfigError:
        names = list(known)
        home = [place for place in self._homes.get(key, ()) if place != field]
        near = nearest(key, names)
        if near is not None and not home:
            hint = f"did you mean {near!r}?"
        elif home:
            hint = f"it belongs to {' or '.join(place or 'the top level' for place in home)}"
        else:
            hint = f"known keys here are {', '.join(names)}"
        place = f"{field}.{key}" if field else key
        message = f"unknown key {shortened(repr(key))}; {hint}"
        line = child.shown_line and node.key_lines.get(key, child.line)
        return ConfigError(message, file=child.file, line=line, field=shortened(printable(place), 120))

    def _dict(self, node: Node, kind: inspect.DictType, field: str) -> Plain:
        if not isinstance(node.value, dict):
            raise _refusal(node, field, f"expected a mapping, found {node.found}")
        return {key: self._value(child, kind.value_type, f"{field}.{printable(key)}") for key, child in node.value.items()}

    def _list(self, node: Node, kind: inspect.VarTupleType | inspect.ListType, field: str) -> Plain:
        if not isinstance(node.value, list):
            raise _refusal(node, field, f"expected a list such as [a, b], found {node.found}")
        return [self._value(child, kind.item_type, f"{field}[{index}]") for index, child in enumerate(node.value)]

    def _scalar(self, node: Node, kind: inspect.Type, field: str) -> Plain:
        value = node.value
        if field in self._raw_text and isinstance(value, int | float) and not isinstance(value, bool):
            return node.text
        if isinstance(kind, inspect.EnumType):
            return self._choice(node, [str(member.value) for member in kind.cls], field)
        if isinstance(kind, inspect.BoolType) and isinstance(value, bool):
            return value
        if isinstance(kind, inspect.StrType) and isinstance(value, str):
            return value
        if isinstance(kind, inspect.IntType | inspect.FloatType) and isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(node, value, kind, field)
        hint = ""
        if isinstance(kind, inspect.BoolType) and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
            hint = f"; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
        raise _refusal(node, field, f"expected {_expected(kind)}, found {node.found}{hint}")

    def _choice(self, node: Node, choices: list[str], field: str) -> Plain:
        if isinstance(node.value, str) and node.value in choices:
            return node.value
        near = nearest(node.text, choices) if node.text else None
        hint = f"; did you mean {near!r}?" if near is not None else ""
        raise _refusal(node, field, f"expected one of {', '.join(choices)}, found {node.found}{hint}")

    def _number(self, node: Node, value: int | float, kind: inspect.IntType | inspect.FloatType, field: str) -> Plain:
        whole = isinstance(kind, inspect.IntType)
        if whole and isinstance(value, float):
            hint = f"; write {int(value)}" if math.isfinite(value) and value == int(value) and abs(value) < INT64 else ""
            raise _refusal(node, field, f"expected {_expected(kind)}, found {node.found}{hint}")
        fits = -INT64 <= value < INT64 if whole else math.isfinite(value)
        for bound, holds in ((kind.ge, "ge"), (kind.gt, "gt"), (kind.le, "le"), (kind.lt, "lt")):
            fits = fits and (bound is None or _compares(value, bound, holds))
        if not fits:
            raise _refusal(node, field, f"expected {_expected(kind)}, found {node.found}")
        return value if whole else float(value)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that was most likely meant, or None when nothing is near. Case and underscores do not count."""
    plain = {choice.lower().replace("_", "").replace("-", ""): choice for choice in choices}
    near = difflib.get_close_matches(shortened(word, 80).lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None


def locate(root: Node, field: str) -> Node:
    """The node at a dotted field such as `spec.tools.mcp[0].name`, or its nearest ancestor that exists."""
    node = root
    for part in field.replace("[", ".").replace("]", "").split("."):
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[part]
        elif isinstance(node.value, list) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
        else:
            break
    return node


def printable(text: str) -> str:
    """`text` with everything unprintable written as an escape."""
    return text if text.isprintable() else repr(text)[1:-1]


def _compares(value: float, bound: Any, relation: str) -> bool:
    return bool({"ge": value >= bound, "gt": value > bound, "le": value <= bound, "lt": value < bound}[relation])


def _expected(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata):
        return _expected(kind.type)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = "a whole number" if isinstance(kind, inspect.IntType) else "a finite number"
        limits = ((kind.ge, "of at least"), (kind.gt, "above"), (kind.le, "at most"), (kind.lt, "below"))
        words = " and ".join(f"{word} {bound}" for bound, word in limits if bound is not None)
        return f"{name} {words}".rstrip()
    names = ((inspect.BoolType, "true or false"), (inspect.StrType, "text"), (inspect.ListType, "a list"), (inspect.DictType, "a mapping"))
    return next((word for base, word in names if isinstance(kind, base)), "another kind of value")


def _shape_fits(node: Node, kind: inspect.Type) -> bool:
    value = node.value
    if isinstance(kind, inspect.BoolType):
        return isinstance(value, bool)
    if isinstance(kind, inspect.IntType):
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(kind, inspect.FloatType):
        return isinstance(value, float)
    if isinstance(kind, inspect.StrType):
        return isinstance(value, str)
    return isinstance(kind, inspect.ListType | inspect.VarTupleType) and isinstance(value, list)


def _homes(root: inspect.StructType) -> dict[str, list[str]]:
    """Every key of the whole type, and the dotted sections it belongs to."""
    homes: dict[str, list[str]] = {}

    def visit(kind: inspect.StructType, field: str) -> None:
        for entry in kind.fields:
            homes.setdefault(entry.encode_name, []).append(field)
            if isinstance(entry.type, inspect.StructType):
                visit(entry.type, f"{field}.{entry.encode_name}" if field else entry.encode_name)

    visit(root, "")
    return homes


def _example(key: str) -> str:
    examples = {"spec": "`spec:`", "model": "`model: {uri: sandmill/tiny-shell}`", "environment": "`environment: {name: shell@1.0.0}`"}
    return f"; write for example {examples[key]}" if key in examples else ""


def _refusal(node: Node, field: str, message: str) -> ConfigError:
    return ConfigError(message, file=node.file, line=node.shown_line, field=field or None)
