"""A head and nodes as real processes on loopback, each with a state folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from server_process import Server

from sandmill.sandboxes.backends.native.state import sweep
from sandmill.server.keys import NODE, Keys

SANDMILL = [sys.executable, "-c", "from sandmill.cli import main; main()"]
NODES = "/apis/nodus.dev/v1/nodes"


class NodeProcess:
    """`sandmill node join`, started as a person starts it."""

    _through: str | None = None
    """Where it finds its head, if not at its own address."""
    _environment: Mapping[str, str] = {}

    def __init__(self, head: Head, name: str, *options: str, through: str | None = None, **environment: str) -> None:
        self.head = head
        self.name = name
        self.folder = head.folder / f"node-{name}"
        self._options = options
        self._through = through
        self._environment = environment
        self.start()

    def start(self) -> None:
        """Starts it and waits until its head has taken it in."""
        self.folder.mkdir(exist_ok=True)
        environment = {**os.environ, "SANDMILL_STATE": str(self.folder / "sandboxes"), "SANDMILL_API_KEY": self.head.node_key}
        environment |= self._environment
        command = [
            *SANDMILL,
            "node",
            "join",
            self._through or self.head.url,
            "--name",
            self.name,
            "--json",
            "--state",
            str(self.folder / "state"),
        ]
        self._errors = (self.folder / "errors").open("ab")
        self.process = subprocess.Popen([*command, *self._options], stdout=subprocess.PIPE, stderr=self._errors, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors
        self.url: str = json.loads(line)["url"]

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.over(timeout)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.over()

    def over(self, timeout: float = 60) -> int:
        """Waits for its end."""
        code = self.process.wait(timeout)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
        return code

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return (self.folder / "errors").read_text()

    @property
    def object(self) -> Any:
        """What its head says of it."""
        return self.head.ask("GET", f"{NODES}/{self.name}").json

    def until(self, **expected: Any) -> Any:
        """Its object at the head, once its status is as expected."""
        return self.head.until(f"{NODES}/{self.name}", **expected)


class Head(Server):
    """`sandmill serve` at a port that outlives it, with a key for nodes and the nodes that joined it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.nodes: list[NodeProcess] = []
        state = folder / "state"
        state.mkdir(mode=0o700)
        self.node_key = Keys(state).make("nodes", role=NODE)
        super().__init__(folder, *options)
        self._options = (*options, "--port", str(self.port))

    def join(self, name: str, *options: str, through: str | None = None, **environment: str) -> NodeProcess:
        """One more node."""
        node = NodeProcess(self, name, *options, through=through, **environment)
        self.nodes.append(node)
        return node

    def cli(self, *words: str) -> str:
        """`sandmill node ...` against this server."""
        environment = {**os.environ, "SANDMILL_API_KEY": self.key}
        command = [*SANDMILL, "node", *words, "--server", self.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def place(self, box: str) -> str | None:
        """The node that a sandbox is on."""
        there = self.ask("GET", f"sandboxes/{box}").json["status"].get("node")
        return None if there is None else str(there["name"])

    def up(self, name: str, **spec: Any) -> Any:
        """A sandbox, once it runs."""
        self.box(name, **spec)
        return self.until(f"sandboxes/{name}", phase="Running")


@contextlib.contextmanager
def heading(folder: Path, *options: str) -> Iterator[Head]:
    """A head for a block; it and its nodes must end, and nobody may have made a mistake."""
    head = Head(folder, *options)
    try:
        yield head
    finally:
        for process in (*(node.process for node in head.nodes), head.process):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        if head.process.poll() is None:
            head.stop()
        for node in head.nodes:
            if node.process.poll() is None:
                node.kill()
            sweep(node.folder / "sandboxes")  # as its next start would: control groups of one that was killed
        sweep(folder / "sandboxes")
    written = [head.errors, *(node.errors for node in head.nodes)]
    assert not [text for text in written if "Traceback" in text], written


def eventually(holds: Any, within_s: float = 15) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, holds
        time.sleep(0.05)
