"""A wire between a node and its head that can stall and damage what goes over it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Listens on loopback and passes everything on to one port, both ways."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.brought = 0
        """Bytes that came from there, over all connections."""
        self.stall_after: int | None = None
        """A connection that has brought so many bytes brings no more."""
        self.stalled = threading.Event()
        self.damage_at: int | None = None
        """Which byte of each connection is another one here than there."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    here.close()
                    continue
                self._open += [here, there]
                threading.Thread(target=self._pass, args=(here, there), daemon=True).start()
                threading.Thread(target=self._bring, args=(there, here), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        _end(target)

    def _bring(self, source: socket.socket, target: socket.socket) -> None:
        brought = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.stall_after is not None and brought >= self.stall_after:
                    self.stalled.set()
                    return
                if self.damage_at is not None and brought <= self.damage_at < brought + len(data):
                    at = self.damage_at - brought
                    data = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
                brought += len(data)
                self.brought += len(data)
                target.sendall(data)
        _end(target)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def relaying(port: int) -> Iterator[Relay]:
    """A relay for a block."""
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()
