"""The server name a TLS client says it wants. In: the first bytes of a connection. Out: that name, None while more bytes are needed.

Only read, never changed: TLS itself stays between the client and the server. A name is what the client claims in the open; what it
asks for inside the encrypted connection nobody can see from here.
"""

from __future__ import annotations

from typing import Final

LARGEST_HELLO: Final = 64 * 1024
ACCESS_DENIED: Final = bytes((21, 3, 3, 0, 2, 2, 49))
"""An alert that clients show as "access denied"."""
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_HOST_NAME: Final = 0
_LARGEST_RECORD: Final = 16384


class NoServerNameError(ValueError):
    """No TLS client begins like this, or it names no server; the text says which."""


class _Bytes:
    """Reads a structure from front to back. Raises NoServerNameError beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise NoServerNameError("a malformed TLS greeting")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> _Bytes:
        """A part that begins with its length in `size` bytes."""
        return _Bytes(self.take(self.number(size)))


def server_name(data: bytes) -> str | None:
    """The name in the ClientHello that `data` begins with; None when it is not complete yet. Raises NoServerNameError."""
    hello = _handshake(data)
    if hello is None:
        return None
    hello.take(2 + 32)
    hello.vector(1)
    hello.vector(2)
    hello.vector(1)
    if not hello.left:
        raise NoServerNameError("a TLS client that names no server")
    return _name_in(hello.vector(2))


def _handshake(data: bytes) -> _Bytes | None:
    """The body of the first handshake message, put together from its records."""
    body, at = bytearray(), 0
    while True:
        if data[at : at + 1] not in (b"", bytes((_HANDSHAKE,))) or data[at + 1 : at + 2] not in (b"", b"\3"):
            raise NoServerNameError("not TLS")
        if len(data) < at + 5:
            return None
        length = int.from_bytes(data[at + 3 : at + 5])
        if not 0 < length <= _LARGEST_RECORD:
            raise NoServerNameError("a malformed TLS greeting")
        body += data[at + 5 : at + 5 + length]
        if body and body[0] != _CLIENT_HELLO:
            raise NoServerNameError("not a TLS client's greeting")
        wanted = 4 + int.from_bytes(body[1:4]) if len(body) >= 4 else LARGEST_HELLO
        if len(body) >= wanted:
            return _Bytes(bytes(body[4:wanted]))
        if len(body) >= 4 and wanted > LARGEST_HELLO:
            raise NoServerNameError("a TLS greeting that is too long")
        at += 5 + length
        if len(data) < at:
            return None


def _name_in(extensions: _Bytes) -> str:
    """Encrypted names (ESNI, ECH) are not looked for: the name in the open is the one that counts, and without one there is none."""
    names: list[bytes] = []
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        entries = content.vector(2)
        while entries.left:
            kind, name = entries.number(1), entries.take(entries.number(2))
            if kind == _HOST_NAME:
                names.append(name)
    if len(names) != 1:
        raise NoServerNameError("a TLS client that names no server" if not names else "a TLS client that names several servers")
    return names[0].decode("latin-1")
