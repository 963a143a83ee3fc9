"""The DNS messages a sandbox may exchange with us. In: a query's bytes. Out: its one question; and an answer's bytes.

Nothing of a query ever leaves: answers are made here, and a name is looked up elsewhere by another message with nothing but the name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Final, NamedTuple

from sandmill.sandboxes.egress.addresses import Address

A: Final = 1
AAAA: Final = 28
NO_ERROR, FORMAT_ERROR, SERVER_FAILURE, NO_SUCH_NAME, NOT_IMPLEMENTED, REFUSED = range(6)
LARGEST_QUERY: Final = 512
_INTERNET: Final = 1
_TTL_S: Final = 60
_MOST_ADDRESSES: Final = 16
_HEADER: Final = struct.Struct("!6H")
_TO_THE_QUESTION: Final = 0xC000 | _HEADER.size


class Query(NamedTuple):
    """One question. `name` is lower-cased ASCII with dots; `question` are its bytes as they came."""

    id: int
    flags: int
    name: str
    kind: int
    question: bytes


class MalformedQueryError(ValueError):
    """These bytes are no query with one question."""


def parse(data: bytes) -> Query:
    """Raises MalformedQueryError."""
    if not _HEADER.size < len(data) <= LARGEST_QUERY:
        raise MalformedQueryError("length")
    id, flags, questions, answers, authorities, _ = _HEADER.unpack_from(data)
    if flags & 0xF800 or (questions, answers, authorities) != (1, 0, 0):
        raise MalformedQueryError("no plain query")
    labels, at = _labels(data, _HEADER.size)
    if at + 4 > len(data):
        raise MalformedQueryError("a question without an end")
    kind, group = struct.unpack_from("!2H", data, at)
    if group != _INTERNET:
        raise MalformedQueryError("another class")
    return Query(id, flags, ".".join(labels), kind, data[_HEADER.size : at + 4])


def _labels(data: bytes, at: int) -> tuple[list[str], int]:
    labels: list[str] = []
    while at < len(data):
        length = data[at]
        if length == 0:
            return labels, at + 1
        label = data[at + 1 : at + 1 + length]
        if length > 63 or len(label) < length or b"." in label:
            raise MalformedQueryError("a label")
        labels.append(label.decode("latin-1").lower())
        at += 1 + length
    raise MalformedQueryError("a name without an end")


def answer(query: Query, code: int, addresses: Sequence[Address] = ()) -> bytes:
    """The answer: a code, and the addresses of the kind that was asked for."""
    chosen = [address for address in addresses if query.kind == (A if isinstance(address, IPv4Address) else AAAA)][:_MOST_ADDRESSES]
    flags = 0x8080 | query.flags & 0x0100 | code  # an answer, recursion available, recursion desired as asked
    parts = [_HEADER.pack(query.id, flags, 1, len(chosen), 0, 0), query.question]
    for address in chosen:
        parts.append(struct.pack("!3HIH", _TO_THE_QUESTION, query.kind, _INTERNET, _TTL_S, len(address.packed)) + address.packed)
    return b"".join(parts)
