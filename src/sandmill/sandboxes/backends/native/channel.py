"""A conversation over one SEQPACKET socket on the sandbox loop. In: messages to send. Out: each reply, with its descriptor, to a callback.

Sends never block the loop; a message that does not fit the socket's buffer waits for room, in order.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable

from sandmill.sandboxes.backends.native.wire import MESSAGE_MAX, Message

_ONE_DESCRIPTOR = socket.CMSG_SPACE(array.array("i").itemsize)
_MOST_PER_WAKEUP = 64


class Channel:
    """One end. `on_message(data, fd)` owns the descriptor (-1: none); `on_end()` is called once, when the other end is gone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, end: socket.socket, on_message: Callable[[bytes, int], None], on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._socket = end
        self._on_message = on_message
        self._on_end = on_end
        self._backlog: deque[Message] = deque()
        self._open = True
        end.setblocking(False)
        loop.add_reader(end.fileno(), self._readable)

    def send(self, message: Message, *, close: tuple[int, ...] = ()) -> None:
        """Sends or queues. `close` are descriptors in the message that are ours no longer; its memfd never is."""
        if not self._open:
            _close(message.memfd, *close)
            return
        if self._backlog or not self._try_send(message):
            held = Message(message.data, tuple(map(os.dup, message.fds)))
            if not self._backlog:
                self._loop.add_writer(self._socket.fileno(), self._writable)
            self._backlog.append(held)
        _close(message.memfd, *close)

    def close(self) -> None:
        """Closes this end without a word. Idempotent."""
        if not self._open:
            return
        self._open = False
        descriptor = self._socket.fileno()
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._socket.close()
        for message in self._backlog:
            _close(*message.fds)
        self._backlog.clear()

    def _try_send(self, message: Message) -> bool:
        try:
            if message.fds:
                self._socket.sendmsg([message.data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", message.fds))])
            else:
                self._socket.send(message.data)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # the reader learns of the end and tells everyone who waits
        return True

    def _writable(self) -> None:
        while self._backlog and self._try_send(self._backlog[0]):
            _close(*self._backlog.popleft().fds)
        if not self._backlog:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        for _ in range(_MOST_PER_WAKEUP):
            if not self._open:
                return
            try:
                data, ancillary, _, _ = self._socket.recvmsg(MESSAGE_MAX, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, ancillary = b"", []
            if not data:
                self.close()
                self._on_end()
                return
            self._on_message(data, _descriptor(ancillary) if ancillary else -1)


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int:
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return descriptors[0] if descriptors else -1


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
