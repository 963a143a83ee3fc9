"""A foreign file's plain values in; a frozen record out, or one sentence with file, field and the nearest valid name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from sandmill.config.check import Checker
from sandmill.config.document import Node, Scalar
from sandmill.errors import ConfigError

R = TypeVar("R", bound=msgspec.Struct)


class _Unlined(Node):
    """A value of a parser that keeps no lines."""

    __slots__ = ()

    @property
    def shown_line(self) -> int | None:
        return None


def checked(node: Node, kind: type[R]) -> R:
    """The record that a document's node describes. Raises ConfigError."""
    plain = Checker(kind, frozenset()).check(node)
    try:
        return msgspec.convert(plain, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), file=node.file) from None


def record(values: Mapping[str, object], kind: type[R], file: str) -> R:
    """The record that plain values describe: text, numbers, booleans, lists and mappings of them. Raises ConfigError."""
    return checked(node_of(values, file), kind)


def node_of(value: object, file: str) -> Node:
    """Plain values as a document's node. Anything else than these becomes its text."""
    if isinstance(value, Mapping):
        return _Unlined({str(key): node_of(inner, file) for key, inner in value.items()}, "", file, 0, {})
    if isinstance(value, list | tuple):
        return _Unlined([node_of(inner, file) for inner in value], "", file, 0, {})
    scalar: Scalar = value if value is None or isinstance(value, str | int | float | bool) else str(value)
    return _Unlined(scalar, str(value), file, 0, {})
