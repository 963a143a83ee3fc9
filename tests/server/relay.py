"""A wire between a node and its head that can stall and damage what goes over it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

_LONG = 40_000


class Relay:
    """Listens on loopback and passes everything on to one port, both ways. Port 0: one that is free now."""

    def __init__(self, port: int) -> None:
        self.far_port = port or free_port()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.brought = 0
        """Bytes that came from there, over all connections."""
        self.stall_after: int | None = None
        """A connection that has brought so many bytes brings no more, but for its end."""
        self.stalled = threading.Event()
        self.damage = 0
        """So many of the pieces to come arrive with another last byte; only long ones, which no message of a few lines is."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends all connections, and takes no more."""
        _end(self._listening)
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Ends all connections."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open = []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self.far_port))
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
                    continue
                if self.damage and len(data) > _LONG:
                    self.damage -= 1
                    data = data[:-1] + bytes([data[-1] ^ 0xFF])
                brought += len(data)
                self.brought += len(data)
                target.sendall(data)
        _end(target)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relaying(port: int) -> Iterator[Relay]:
    """A relay for a block."""
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()
