"""One HTTP/1 request at a time, read strictly. In: a request's head. Out: the host it is for, the head to send on, and where its body ends.

Whatever two readers could understand differently is refused, not repaired: where a request ends decides whose name is checked next.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

LARGEST_HEAD: Final = 32 * 1024
LONGEST_CHUNK_LINE: Final = 256
CHUNKED: Final = -1
"""`Request.body_bytes` of a body that comes in chunks."""
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"(%b) ([\x21-\x7e]+) HTTP/1\.([01])" % _TOKEN)
_FIELD = re.compile(rb"(%b):[ \t]*((?:[\x21-\x7e\x80-\xff](?:[\x20-\x7e\x80-\xff\t]*[\x21-\x7e\x80-\xff])?)?)[ \t]*" % _TOKEN)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\x20-\x7e\t]*)?\r\n")
_ABSOLUTE = re.compile(rb"http://([^/?#]+)(.*)", re.IGNORECASE)
_NOT_SENT_ON: Final = frozenset(
    {b"connection", b"http2-settings", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"upgrade"}
)
"""Between a client and its next hop only. Without Upgrade no connection can turn into another protocol."""


class Request(NamedTuple):
    """A request that can be understood in one way only."""

    host: str
    """As the client wrote it, without a port."""
    head: bytes
    """What is sent on."""
    body_bytes: int
    """Length of the body; CHUNKED when it comes in chunks."""


class BadRequestError(ValueError):
    """Not such a request; the text says why."""


def parse(head: bytes) -> Request:
    """`head` ends with the empty line. Raises BadRequestError."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if first.startswith(b"PRI * HTTP/2"):
        raise BadRequestError("HTTP/2 without TLS")
    match = _LINE.fullmatch(first)
    if match is None:
        raise BadRequestError("not an HTTP/1 request")
    method, target, minor = match.groups()
    if method == b"CONNECT":
        raise BadRequestError("the method CONNECT")
    fields = [_field(line) for line in lines]
    host = _only(fields, b"host")
    if not host:
        raise BadRequestError("an HTTP request without a host")
    name, _, port = host.partition(b":")
    if port not in (b"", b"80"):
        raise BadRequestError("an HTTP request for another port")
    sent_on = [b"%b %b HTTP/1.%b" % (method, _path(method, target, host), minor)]
    sent_on += [b"%b: %b" % field for field in fields if field[0].lower() not in _NOT_SENT_ON]
    if (_only(fields, b"connection") or b"").lower() in (b"close", b"keep-alive"):
        sent_on.append(b"Connection: %b" % (_only(fields, b"connection") or b""))
    return Request(name.decode("latin-1"), b"\r\n".join(sent_on) + b"\r\n\r\n", _body_bytes(fields, minor))


def chunk_bytes(line: bytes) -> int:
    """The length in a chunk's first line. Raises BadRequestError."""
    match = _CHUNK_LINE.fullmatch(line)
    if match is None:
        raise BadRequestError("a malformed HTTP chunk")
    return int(match.group(1), 16)


def reply(status: str, sentence: str) -> bytes:
    """An answer of our own, for whoever reads the client's output."""
    body = f"{sentence}\n".encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _field(line: bytes) -> tuple[bytes, bytes]:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise BadRequestError("a malformed HTTP header")
    return match.group(1), match.group(2)


def _only(fields: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    values = [value for key, value in fields if key.lower() == name]
    if len(values) > 1:
        raise BadRequestError(f"an HTTP request with several {name.decode()} headers")
    return values[0] if values else None


def _path(method: bytes, target: bytes, host: bytes) -> bytes:
    """The target in the form that servers get: a path."""
    if target.startswith(b"/") or (method == b"OPTIONS" and target == b"*"):
        return target
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise BadRequestError("an HTTP request with an odd target")
    authority, path = match.groups()
    if authority.lower().removesuffix(b":80") != host.lower().removesuffix(b":80"):
        raise BadRequestError("an HTTP request for two hosts")
    return path if path.startswith(b"/") else b"/" + path


def _body_bytes(fields: list[tuple[bytes, bytes]], minor: bytes) -> int:
    coding, length = _only(fields, b"transfer-encoding"), _only(fields, b"content-length")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None or minor != b"1":
            raise BadRequestError("an HTTP request whose end is unclear")
        return CHUNKED
    if length is None:
        return 0
    if _LENGTH.fullmatch(length) is None:
        raise BadRequestError("an HTTP request whose end is unclear")
    return int(length)
