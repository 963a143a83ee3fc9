"""Messages as frames on a stream (native/guest.c). In: the agent's messages. Out: bytes for a machine; and from its bytes, replies."""

from __future__ import annotations

import base64
import binascii
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final

from sandmill.sandboxes.backends.native import wire

_PIECE: Final = 192 * 1024
"""Payload bytes of one frame."""
_LONGEST_FRAME: Final = 1 << 20
_LENGTH: Final = struct.Struct("=I")


class FrameLink:
    """One guest's conversation, on the sandbox loop."""

    def __init__(
        self, send: Callable[[bytes], None], on_message: Callable[[bytes, int], None], on_end: Callable[[], None], *, text: bool
    ) -> None:
        self._send = send
        self._on_message = on_message
        self._on_end = on_end
        self._text = text
        self._held = bytearray()
        self._open = True

    def send(self, message: wire.Message, *, close: tuple[int, ...] = ()) -> None:
        """Queues a message; its payload goes along whole, in as many frames as it takes."""
        for descriptor in close:
            os.close(descriptor)
        if self._open:
            self._send(b"".join(map(self._frame, _pieces(message))))
        elif message.memfd >= 0:
            os.close(message.memfd)

    def close(self) -> None:
        """No more is sent or heard. Idempotent."""
        self._open = False
        self._held.clear()

    def received(self, data: bytes) -> None:
        """What the guest wrote: hostile, like everything from inside."""
        self._held += data
        while self._open and (body := self._next()) is not None:
            if body:
                self._on_message(body, -1)

    def ended(self) -> None:
        """The stream is over."""
        if self._open:
            self._on_end()

    def _frame(self, body: bytes) -> bytes:
        return base64.b64encode(body) + b"\n" if self._text else _LENGTH.pack(len(body)) + body

    def _next(self) -> bytes | None:
        """The first whole frame, None when there is none yet."""
        if self._text:
            line, found, rest = self._held.partition(b"\n")
            if len(line) > 2 * _LONGEST_FRAME:
                return b"\0"  # no reply is that short: whoever parses it ends the conversation
            if not found:
                return None
            self._held = rest
            try:
                return base64.b64decode(line)
            except binascii.Error:
                return b"\0"
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > _LONGEST_FRAME:
            return b"\0"
        if len(self._held) < _LENGTH.size + length:
            return None
        body = bytes(self._held[_LENGTH.size : _LENGTH.size + length])
        del self._held[: _LENGTH.size + length]
        return body


def _pieces(message: wire.Message) -> Iterator[bytes]:
    """The bodies of a message's frames. Its memfd is closed."""
    head, payload = message.data[: wire.REQUEST_BYTES], message.data[wire.REQUEST_BYTES :]
    if message.memfd >= 0:
        with os.fdopen(message.memfd, "rb") as held:
            held.seek(0)
            payload = held.read()
    last = max(0, (len(payload) - 1) // _PIECE * _PIECE)
    for start in range(0, last, _PIECE):
        yield wire.agent_request(wire.PART, 0).data + payload[start : start + _PIECE]
    yield head + payload[last:]
