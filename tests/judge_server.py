"""A real judge for tests: an OpenAI-compatible server on loopback, whose replies are chosen by what it is asked."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KEY = "sk-tell-nobody-1234567890"


class JudgeServer(http.server.ThreadingHTTPServer):
    """Says `yes` unless the last message names another thing to do. Keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.heard: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: dict[str, int] = {}
        self.hung = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: JudgeServer

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append(asked)
        self.server.keys.append(self.headers["Authorization"])
        how = str(asked["messages"][-1]["content"]).split()[-1]
        seen = self.server.times[how] = self.server.times.get(how, 0) + 1
        getattr(self, f"say_{how.replace('-', '_')}", self.say_yes)(seen)

    def say_yes(self, seen: int) -> None:
        self.tell(200, completion("yes"))

    def say_once_busy(self, seen: int) -> None:
        self.tell(429, {"error": "busy"}, retry="0") if seen == 1 else self.say_yes(seen)

    def say_busy(self, seen: int) -> None:
        self.tell(429, {"error": "busy"}, retry="0")

    def say_error(self, seen: int) -> None:
        self.tell(500, {"error": "broken"})

    def say_denied(self, seen: int) -> None:
        self.tell(401, {"error": f"the key {KEY} is not known"})

    def say_hang(self, seen: int) -> None:
        self.server.hung.set()
        time.sleep(30)

    def say_cut(self, seen: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"choices": [{"message": {"content": "ye')
        self.close_connection = True

    def say_html(self, seen: int) -> None:
        self.raw(200, b"<html>all is well</html>")

    def say_other(self, seen: int) -> None:
        self.tell(200, {"error": "no choices"})

    def say_nothing(self, seen: int) -> None:
        self.tell(200, completion("", finish="length"))

    def say_uncounted(self, seen: int) -> None:
        whole = completion("yes")
        del whole["usage"]
        self.tell(200, whole)

    def say_long(self, seen: int) -> None:
        self.tell(200, completion("yes", finish="length", replied=50))

    def tell(self, status: int, whole: dict[str, Any], retry: str | None = None) -> None:
        self.raw(status, json.dumps(whole).encode(), retry)

    def raw(self, status: int, body: bytes, retry: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if retry is not None:
            self.send_header("Retry-After", retry)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def completion(text: str, *, finish: str = "stop", replied: int = 3) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 20, "completion_tokens": replied, "total_tokens": 20 + replied}
    choices = [{"index": 0, "message": message, "finish_reason": finish}]
    return {"id": "c1", "object": "chat.completion", "created": 1, "model": "real-judge", "choices": choices, "usage": usage}


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
