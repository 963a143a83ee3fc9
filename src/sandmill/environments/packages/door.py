"""A port on the loopback of a package's sandbox, at which its graders may ask. In: HTTP requests. Out: ASK frames; the answers back.

Standard library only: it is copied into the sandbox. It is a process of its own, as a user of its own, which knows no key and reaches
nothing but the worker that forked it. Who asks is what the kernel says about the other end of a connection, never what a request says.
"""

from __future__ import annotations

import ctypes
import http.server
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from sandmill.environments.packages.frames import ANSWER, ASK, CHUNK, FIRST_UID, UIDS, packed, taken

UID = 19_999
LARGEST_REQUEST_BYTES = 8 << 20
_PATIENCE_S = 3600.0
_SILENCE_S = 120.0
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


class Door:
    """The worker's end."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._buffer = bytearray()

    @classmethod
    def opened(cls, port: int, private: tuple[int, ...]) -> Door:
        """Listens, in a process that has none of the `private` descriptors. Raises OSError when the port is taken."""
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                ours.close()
                for descriptor in private:
                    os.close(descriptor)
                _give_up_rights()
                _Server(listener, theirs).serve_forever()
            finally:
                os._exit(0)
        listener.close()
        theirs.close()
        return cls(ours)

    def asked(self) -> Iterator[tuple[int, int, bytes]]:
        """What has come, after the channel became readable: the asking user, the number of the request, and the request."""
        data = self.channel.recv(CHUNK)
        if not data:
            raise EOFError("the door's process has ended")
        self._buffer += data
        while (frame := taken(self._buffer)) is not None:
            uid, _, number, body = frame
            yield uid, number, body


def refusal(status: int, reason: str) -> bytes:
    """The body of an ANSWER that is an error, as OpenAI's clients read them."""
    return _told(status, json.dumps({"error": {"message": reason, "type": "sandmill", "code": None}}).encode())


def asked(method: str, path: str, body: bytes = b"", refused: str = "") -> bytes:
    """The body of an ASK. `refused`: why it is none that could be served."""
    return json.dumps({"method": method, "path": path[:2000], "refused": refused}).encode() + b"\n" + body


def _told(status: int, body: bytes) -> bytes:
    return json.dumps({"status": status, "kind": "application/json"}).encode() + b"\n" + body


def _give_up_rights() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 1)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(UID)
        os.setuid(UID)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_DUMPABLE, 0)


class _Server(http.server.ThreadingHTTPServer):
    """Passes requests on to the worker, and its answers back to whoever waits for them."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, channel: socket.socket) -> None:
        super().__init__(("127.0.0.1", 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self._channel = channel
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting: dict[int, tuple[threading.Event, list[bytes]]] = {}
        threading.Thread(target=self._receive, daemon=True).start()

    def ask(self, uid: int, body: bytes) -> bytes:
        """Waits for the answer to one request."""
        number = next(self._numbers)
        come, answers = self._waiting[number] = (threading.Event(), [])
        try:
            self._send(uid, body, number)
            come.wait(_PATIENCE_S)
        finally:
            del self._waiting[number]
        return answers[0] if answers else refusal(504, "no answer came")

    def _send(self, uid: int, body: bytes, number: int) -> None:
        with self._sending:
            self._channel.sendall(packed(ASK, uid, body, number))

    def _receive(self) -> None:
        buffer = bytearray()
        while data := self._channel.recv(CHUNK):
            buffer += data
            while (frame := taken(buffer)) is not None:
                _, kind, number, body = frame
                waiting = self._waiting.get(number)
                if kind == ANSWER and waiting is not None:
                    waiting[1].append(body)
                    waiting[0].set()
        os._exit(0)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A connection for which there is no thread is closed; that it was refused has to be known, or a grader could overlook it."""
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            uid = owner(client_address, self.server_address)
            if uid is not None:
                self._send(uid, asked("", "", refused="more connections than there can be"), 0)
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up: nobody is told."""


class _Request(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_S
    disable_nagle_algorithm = True  # or a body waits 40 ms for its header to be acknowledged
    server: _Server

    def do_POST(self) -> None:
        """Any method: whether it is served is decided outside."""
        uid = owner(self.client_address, self.server.server_address)
        length = self.headers.get("Content-Length", "0" if self.command in ("GET", "DELETE") else "")
        refused = ""
        if not (length.isascii() and length.isdigit()):
            refused = "the grader sent a request without a Content-Length"
        elif len(length) > 9 or int(length) > LARGEST_REQUEST_BYTES:
            refused = f"the grader sent a request of {length[:20]} bytes, and it may have {LARGEST_REQUEST_BYTES}"
        self.close_connection = self.close_connection or bool(refused)
        if uid is None or not 0 <= uid - FIRST_UID < UIDS:  # the worker, while it loads the package, could not even say so
            self._tell(refusal(403, "only a grading may ask, as its own user"))
        else:
            body = b"" if refused else self.rfile.read(int(length))
            self._tell(self.server.ask(uid, asked(self.command, self.path, body, refused)))

    do_GET = do_DELETE = do_PUT = do_POST

    def _tell(self, answer: bytes) -> None:
        head, _, body = answer.partition(b"\n")
        told = json.loads(head)
        self.send_response(told["status"])
        self.send_header("Content-Type", told["kind"])
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-should-retry", "false")  # the broker has tried again already; OpenAI's clients heed this
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: descriptor 2 is the null device."""


def owner(client: Any, server: Any) -> int | None:
    """The user whose process has the other end of a connection over loopback, as the kernel says; None when it has gone."""
    wanted = (_shown(*client), _shown(*server))
    with open("/proc/net/tcp") as table:
        for line in table:
            fields = line.split()
            if len(fields) > 7 and (fields[1], fields[2]) == wanted:
                return int(fields[7])
    return None


def _shown(address: str, port: int) -> str:
    """As /proc/net/tcp writes it: the four bytes as one number of this machine, then the port."""
    return f"{int.from_bytes(socket.inet_aton(address), 'little'):08X}:{port:04X}"
