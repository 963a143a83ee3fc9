"""What a field may hold, said once. In: JSON values from outside. Out: normalised values, or every cause at once; and OpenAPI documents.

A `Shape` both checks a value and describes itself, so that the API's document and its behaviour cannot drift apart. All causes of
one object are collected: a person fixes a manifest in one go.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from sandmill.config.quantities import parse_bytes, parse_cpu, parse_duration, parse_usd
from sandmill.errors import ConfigError
from sandmill.server.refusals import LONGEST_SHOWN, Cause

JSON = Any
"""A decoded JSON value."""
UNSUPPORTED: Final = "Unsupported"
DURATION_PATTERN: Final = r"^([0-9]{1,12}(\.[0-9]{1,9})?(ns|us|µs|ms|s|m|h)){1,6}$|^0$"
QUANTITY_PATTERN: Final = r"^[0-9]{1,18}(\.[0-9]{1,9})?(k|M|G|T|Ki|Mi|Gi|Ti)?$"
MONEY_PATTERN: Final = r"^[0-9]{1,10}(\.[0-9]{1,6})?$"


class Causes:
    """What was found wrong so far."""

    def __init__(self) -> None:
        self.found: list[Cause] = []

    def add(self, field: str, reason: str, message: str) -> None:
        """One more."""
        self.found.append(Cause(field, reason, message))


class Shape(Protocol):
    """A kind of value."""

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        """The value as it is stored; anything wrong goes to `causes`."""
        ...

    def document(self) -> dict[str, Any]:
        """The OpenAPI schema."""
        ...


def shown(value: JSON) -> str:
    """A value from outside, for a message: ASCII and short."""
    text = ascii(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean ...?` or, when nothing is near, nothing."""
    near = difflib.get_close_matches(word[:64], known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A string."""

    about: str = ""
    pattern: str | None = None
    expect: str = "text"
    longest: int = 4096
    shortest: int = 0
    default: str | None = None

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if not isinstance(value, str):
            causes.add(at, "FieldValueTypeInvalid", f"expected {self.expect}, found {shown(value)}")
        elif len(value) > self.longest:
            causes.add(at, "FieldValueTooLong", f"may have {self.longest} characters at most, has {len(value)}")
        elif len(value) < self.shortest or "\0" in value or not _encodable(value):
            causes.add(at, "FieldValueInvalid", f"expected {self.expect} without NUL or half characters, found {shown(value)}")
        elif self.pattern is not None and not re.fullmatch(self.pattern, value):
            causes.add(at, "FieldValueInvalid", f"expected {self.expect}, found {shown(value)}")
        return value

    def document(self) -> dict[str, Any]:
        out: dict[str, Any] = {"type": "string", "description": self.about, "maxLength": self.longest}
        if self.pattern is not None:
            out["pattern"] = f"^(?:{self.pattern})$"
        if self.shortest:
            out["minLength"] = self.shortest
        return out | _default(self.default)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One of a few words."""

    words: tuple[str, ...]
    about: str = ""
    default: str | None = None

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if not isinstance(value, str):
            causes.add(at, "FieldValueTypeInvalid", f"expected one of {', '.join(self.words)}, found {shown(value)}")
        elif value not in self.words:
            by_case = {word.lower(): word for word in self.words}
            near = by_case.get(value.lower())
            hint = f"; did you mean {near!r}?" if near else nearest(value, list(self.words))
            causes.add(at, "FieldValueNotSupported", f"expected one of {', '.join(self.words)}, found {shown(value)}{hint}")
        return value

    def document(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.words), "description": self.about} | _default(self.default)


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity, duration or sum of money as a string; `parse` raises ConfigError."""

    parse: Callable[..., float | int]
    pattern: str
    about: str = ""
    least: float = 0
    least_shown: str = "0"
    most: float = float("inf")
    most_shown: str = ""
    zero: bool = False
    """Zero is allowed below `least` (it means never)."""
    default: str | None = None

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if not isinstance(value, str):
            causes.add(at, "FieldValueTypeInvalid", f"expected a string such as {self.default or '1'!r}, found {shown(value)}")
            return value
        try:
            amount = self.parse(value)
        except ConfigError as error:
            causes.add(at, "FieldValueInvalid", ascii_of(error.message))
            return value
        if amount < self.least and not (self.zero and amount == 0):
            causes.add(at, "FieldValueInvalid", f"must be at least {self.least_shown}, not {shown(value)}")
        elif amount > self.most:
            causes.add(at, "FieldValueInvalid", f"must be at most {self.most_shown}, not {shown(value)}")
        return value

    def document(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self.pattern, "description": self.about} | _default(self.default)


def ascii_of(text: str) -> str:
    """A sentence with a caller's words in it, as ASCII and of bounded length."""
    return text.encode("ascii", "backslashreplace").decode()[:1000]


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """An integer."""

    least: int
    most: int
    about: str = ""

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if isinstance(value, bool) or not isinstance(value, int):
            causes.add(at, "FieldValueTypeInvalid", f"expected a whole number, found {shown(value)}")
        elif not self.least <= value <= self.most:
            causes.add(at, "FieldValueInvalid", f"must be from {self.least} to {self.most}, not {shown(value)}")
        return value

    def document(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most, "description": self.about}


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """A finite number. `above`: `least` itself is too small."""

    least: float
    most: float
    above: bool = False
    about: str = ""

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if isinstance(value, bool) or not isinstance(value, int | float):
            causes.add(at, "FieldValueTypeInvalid", f"expected a number, found {shown(value)}")
        elif not self.least <= value <= self.most or (self.above and value == self.least):
            causes.add(
                at, "FieldValueInvalid", f"must be {'above' if self.above else 'from'} {self.least:g} to {self.most:g}, not {shown(value)}"
            )
        return value

    def document(self) -> dict[str, Any]:
        out = {"type": "number", "minimum": self.least, "maximum": self.most, "description": self.about}
        return out | ({"exclusiveMinimum": True} if self.above else {})


class Anything(msgspec.Struct, frozen=True, kw_only=True):
    """JSON that is kept and not looked into, of bounded size."""

    longest_bytes: int
    about: str = ""

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        try:
            size = len(msgspec.json.encode(value))
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            causes.add(at, "FieldValueInvalid", "is nothing that JSON can say again")
            return value
        if size > self.longest_bytes:
            causes.add(at, "FieldValueTooLong", f"may have {self.longest_bytes} bytes at most, has {size}")
        return value

    def document(self) -> dict[str, Any]:
        return {"description": self.about, "x-kubernetes-preserve-unknown-fields": True}


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """true or false."""

    about: str = ""

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if not isinstance(value, bool):
            causes.add(at, "FieldValueTypeInvalid", f"expected true or false, found {shown(value)}")
        return value

    def document(self) -> dict[str, Any]:
        return {"type": "boolean", "description": self.about}


class Many(msgspec.Struct, frozen=True, kw_only=True):
    """A list; with `unique`, that key of its items may not repeat."""

    of: Shape
    longest: int
    shortest: int = 0
    about: str = ""
    unique: str | None = None

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if not isinstance(value, list):
            causes.add(at, "FieldValueTypeInvalid", f"expected a list, found {shown(value)}")
            return value
        if not self.shortest <= len(value) <= self.longest:
            causes.add(at, "FieldValueInvalid", f"must have from {self.shortest} to {self.longest} items, has {len(value)}")
            return value
        checked = [self.of.check(item, f"{at}[{place}]", causes) for place, item in enumerate(value)]
        if self.unique is not None:
            seen: set[str] = set()
            for place, item in enumerate(checked):
                word = item.get(self.unique) if isinstance(item, dict) else None
                if isinstance(word, str) and word in seen:
                    causes.add(f"{at}[{place}].{self.unique}", "FieldValueDuplicate", f"{shown(word)} appears twice")
                if isinstance(word, str):
                    seen.add(word)
        return checked

    def document(self) -> dict[str, Any]:
        out = {"type": "array", "items": self.of.document(), "maxItems": self.longest, "description": self.about}
        return out | ({"minItems": self.shortest} if self.shortest else {})


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """A map of strings."""

    keys: Text
    values: Text
    most: int = 256
    about: str = ""

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if not isinstance(value, dict):
            causes.add(at, "FieldValueTypeInvalid", f"expected names with values, found {shown(value)}")
            return value
        if len(value) > self.most:
            causes.add(at, "FieldValueInvalid", f"may have {self.most} entries at most, has {len(value)}")
            return value
        for key, word in value.items():
            place = f"{at}[{shown(key)}]"
            self.keys.check(key, place, causes)
            self.values.check(word, place, causes)
        return value

    def document(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.values.document(), "maxProperties": self.most, "description": self.about}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """An object with known fields. `refused` and `unsupported` are fields of the published API that this server does not serve, with the
    reason; an object whose only fault is an unsupported one is answered with that word."""

    fields: Mapping[str, Shape]
    about: str = ""
    required: tuple[str, ...] = ()
    defaults: Mapping[str, JSON] = {}
    refused: Mapping[str, str] = {}
    unsupported: Mapping[str, str] = {}

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        if not isinstance(value, dict):
            causes.add(at, "FieldValueTypeInvalid", f"expected an object, found {shown(value)}")
            return value
        given = {key: part for key, part in value.items() if part is not None}
        for name in self.required:
            if name not in given:
                causes.add(f"{at}.{name}" if at else name, "FieldValueRequired", "must be given")
        out: dict[str, JSON] = {}
        for name, part in given.items():
            place = f"{at}.{ascii_of(name[:LONGEST_SHOWN])}" if at else ascii_of(name[:LONGEST_SHOWN])
            if name in self.fields:
                out[name] = self.fields[name].check(part, place, causes)
            elif name in self.refused:
                causes.add(place, "FieldValueNotSupported", self.refused[name])
            elif name in self.unsupported:
                causes.add(place, UNSUPPORTED, self.unsupported[name])
            else:
                causes.add(place, "FieldValueNotSupported", f"unknown field {shown(name)}{nearest(name, list(self.fields))}")
        for name, default in self.defaults.items():
            out.setdefault(name, self.fields[name].check(default, name, causes))
        return out

    def document(self) -> dict[str, Any]:
        properties = {name: shape.document() for name, shape in self.fields.items()}
        out: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False, "description": self.about}
        return out | ({"required": list(self.required)} if self.required else {})


class Either(msgspec.Struct, frozen=True, kw_only=True):
    """A record that may be written as one string, which stands for its field `key`."""

    record: Record
    key: str

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        return self.record.check({self.key: value} if isinstance(value, str) else value, at, causes)

    def document(self) -> dict[str, Any]:
        return {"oneOf": [self.record.fields[self.key].document(), self.record.document()]}


def _default(value: JSON) -> dict[str, JSON]:
    return {} if value is None else {"default": value}


def duration(about: str, *, least: str, most: str, zero: bool = False, default: str | None = None) -> Amount:
    """A Go duration."""
    return Amount(
        parse=parse_duration,
        pattern=DURATION_PATTERN,
        about=about,
        least=parse_duration(least),
        least_shown=least + (" (or 0s for never)" if zero else ""),
        most=parse_duration(most),
        most_shown=most,
        zero=zero,
        default=default,
    )


def size(about: str, *, least: str, most: str, default: str | None = None) -> Amount:
    """A Kubernetes quantity of bytes."""
    return Amount(
        parse=parse_bytes,
        pattern=QUANTITY_PATTERN,
        about=about,
        least=parse_bytes(least),
        least_shown=least,
        most=parse_bytes(most),
        most_shown=most,
        default=default,
    )


def cores(about: str, *, default: str | None = None) -> Amount:
    """A Kubernetes quantity of cpu."""
    pattern = r"^[0-9]{1,6}(\.[0-9]{1,6})?m?$"
    return Amount(
        parse=parse_cpu, pattern=pattern, about=about, least=0.01, least_shown="10m", most=1024, most_shown="1024", default=default
    )


def money(about: str) -> Amount:
    """US dollars, at least a cent's hundredth."""
    return Amount(parse=parse_usd, pattern=MONEY_PATTERN, about=about, least=1, least_shown='"0.000001"', default=None)
