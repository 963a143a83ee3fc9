"""An internet for tests: names, public addresses and ports, each of which leads to a real server on this machine's loopback.

It stands where the host's resolver and routes are otherwise; the proxy's own checks are the real ones.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from ipaddress import ip_address

import trustme

from sandmill.sandboxes import Egress, Sandbox
from sandmill.sandboxes.egress.addresses import Address

GOOD, OTHER, EVIL = "93.184.216.34", "93.184.216.35", "45.33.32.156"
"""Public addresses, used here as names of servers."""

Talk = Callable[[socket.socket], None]
Boxes = Callable[[Egress], Sandbox]
FETCH = """
import sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=5).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
    except Exception as error:
        print(type(error).__name__, error)
"""
RAW = """
import socket, sys
end = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
end.sendall(sys.stdin.buffer.read())
end.settimeout(2)
try:
    while data := end.recv(65536):
        sys.stdout.buffer.write(data)
except OSError:
    pass
"""
LOOK_UP = """
import socket, sys
for name in sys.argv[1:]:
    try:
        print(sorted({entry[4][0] for entry in socket.getaddrinfo(name, 80)}))
    except OSError as error:
        print(type(error).__name__)
"""


class Server:
    """Accepts on loopback until closed and keeps what every client sent first."""

    def __init__(self, talk: Talk, context: ssl.SSLContext | None = None) -> None:
        self.heard: list[bytes] = []
        self.names: list[str] = []
        self.open_connections = 0
        self._talk = talk
        self._context = context
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        if context is not None:
            context.sni_callback = lambda _connection, name, _context: self.names.append(name or "")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self.open_connections += 1
        try:
            with connection:
                connection.settimeout(20)
                if self._context is not None:
                    with self._context.wrap_socket(connection, server_side=True) as wrapped:
                        self._talk(wrapped)
                else:
                    self._talk(connection)
        except OSError:
            pass
        finally:
            self.open_connections -= 1

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Internet:
    """`Outside` for tests. `names` maps a host name to the answers it gives, one after another, the last for ever."""

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.servers: dict[tuple[str, int], int] = {}
        self.lookups: list[str] = []
        self.connections: list[tuple[str, int]] = []
        self._open: list[Server] = []

    def serve(self, address: str, port: int, talk: Talk, context: ssl.SSLContext | None = None) -> Server:
        server = Server(talk, context)
        self._open.append(server)
        self.servers[(address, port)] = server.port
        return server

    def lookup(self, name: str) -> Future[list[Address]]:
        self.lookups.append(name)
        future: Future[list[Address]] = Future()
        answers = self.names.get(name)
        if answers is None:
            future.set_exception(OSError("no such name"))
        else:
            future.set_result([ip_address(text) for text in (answers.pop(0) if len(answers) > 1 else answers[0])])
        return future

    async def connect(self, address: Address, port: int) -> socket.socket:
        self.connections.append((str(address), port))
        there = self.servers.get((str(address), port))
        if there is None:
            raise ConnectionRefusedError(111, "Connection refused")
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", there))
        return connection

    def close(self) -> None:
        for server in self._open:
            server.close()


@contextmanager
def internet() -> Iterator[Internet]:
    world = Internet()
    try:
        yield world
    finally:
        world.close()


def http_server(world: Internet, address: str, name: str, port: int = 80, context: ssl.SSLContext | None = None) -> Server:
    """Answers every request with `<name> got <host> <path>`, keeping the connection; `/to/<host>` redirects there."""
    heard: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                piece = connection.recv(65536)
                if not piece:
                    return
                data += piece
            head, _, data = data.partition(b"\r\n\r\n")
            heard.append(head)
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            length = int(fields.get(b"content-length", b"0"))
            while len(data) < length:
                data += connection.recv(65536)
            heard[-1] += b"|" + data[:length]
            data = data[length:]
            path = head.split(b" ")[1]
            body = b"%b got %b %b" % (name.encode(), fields[b"host"], path)
            status = b"302 Found\r\nLocation: http://%b/" % path[4:] if path.startswith(b"/to/") else b"200 OK"
            connection.sendall(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    server = world.serve(address, port, talk, context)
    server.heard = heard
    return server


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def server_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def until(condition: Callable[[], bool], patience_s: float = 5.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def fetch(box: Sandbox, *urls: str) -> list[str]:
    return box.run("python3", "-c", FETCH, *urls, timeout=20).stdout.decode().splitlines()


def raw(box: Sandbox, data: bytes, address: str = "198.18.0.1", port: int = 80) -> bytes:
    return box.run("python3", "-c", RAW, address, str(port), stdin=data, timeout=20).stdout


def blocked(box: Sandbox) -> set[tuple[str, int, str]]:
    return {(entry.host, entry.port, entry.reason) for entry in box.blocked}
