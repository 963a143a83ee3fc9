"""A real server process for tests, and a small HTTP client for what the published one does not do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

KEY = "sandmill_test_0123456789abcdef"
NODUS = str(Path(sys.executable).parent / "nodus")
BASE = "/apis/nodus.dev/v1/namespaces/default"
PRICES = "hours:\n  sandbox: '0.0179'\n"


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def causes(self) -> dict[str, str]:
        """Field to reason, of a refusal."""
        return {cause["field"]: cause["reason"] for cause in self.json.get("details", {}).get("causes", ())}


class Server:
    """`sandmill serve`, started as a person starts it."""

    def __init__(self, folder: Path, *options: str, key: str = KEY) -> None:
        self.folder = folder
        self.key = key
        self._options = options
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        environment = {**os.environ, "SANDMILL_STATE": str(self.folder / "sandboxes"), "SANDMILL_API_KEY": self.key}
        command = [sys.executable, "-c", "from sandmill.cli import main; main()", "serve", "--port", "0", "--json"]
        self._errors = (self.folder / "errors").open("ab")
        self.process = subprocess.Popen(
            [*command, "--state", str(self.folder / "state"), *self._options], stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "errors").read_text()
        self.url: str = json.loads(line)["url"]
        self.port = int(self.url.rsplit(":", 1)[1])

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._over()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self._over()

    def _over(self) -> int:
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
        return code

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return (self.folder / "errors").read_text()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, *, timeout: float = 60) -> Answer:
        """One request; `path` may be relative to the default project."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"} | (headers or {})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path if path.startswith("/") else f"{BASE}/{path}", data, sent)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def box(self, name: str, **spec: Any) -> dict[str, Any]:
        """A small sandbox."""
        given = {"resources": {"memory": "256Mi", "disk": "32Mi"}} | spec
        answer = self.ask("POST", "sandboxes", {"metadata": {"name": name}, "spec": given})
        assert answer.status == 201, answer.body
        made: dict[str, Any] = answer.json
        return made

    def run(self, box: str, *command: str, **spec: Any) -> dict[str, Any]:
        """A command, to its end."""
        answer = self.ask("POST", f"sandboxes/{box}/processes", {"spec": {"command": list(command), **spec}})
        assert answer.status == 201, answer.body
        ended: dict[str, Any] = self.ask("GET", f"processes/{answer.json['metadata']['name']}?wait=30s").json
        return ended

    def output(self, process: str, stream: str = "stdout") -> bytes:
        """All that a process wrote."""
        import base64

        lines = self.ask("GET", f"processes/{process}/output?stream={stream}&wait=30s").body.splitlines()
        return b"".join(base64.b64decode(frame["data"]) for frame in map(json.loads, lines) if "data" in frame)

    def until(self, path: str, **expected: Any) -> dict[str, Any]:
        """The object, once its status is as expected."""
        deadline = time.monotonic() + 20
        while True:
            found = self.ask("GET", path)
            value: dict[str, Any] = found.json
            if found.status == 200 and all(value["status"].get(key) == word for key, word in expected.items()):
                return value
            assert time.monotonic() < deadline, value
            time.sleep(0.05)

    def gone(self, path: str, within_s: float = 10) -> None:
        """Waits until there is no such object."""
        deadline = time.monotonic() + within_s
        while self.ask("GET", path).status != 404:
            assert time.monotonic() < deadline, self.ask("GET", path).json
            time.sleep(0.05)

    @property
    def environment(self) -> dict[str, str]:
        """What the published clients need to find it."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return {"PATH": os.environ["PATH"], "HOME": str(home), "NODUS_API_URL": self.url, "NODUS_API_KEY": self.key}


@contextlib.contextmanager
def serving(folder: Path, *options: str, key: str = KEY) -> Iterator[Server]:
    """A server for a block; it must end well, and must not have made a mistake."""
    server = Server(folder, *options, key=key)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            assert server.stop() == 0
    assert "Traceback" not in server.errors, server.errors
