"""What runs out is said to have run out: it is no exit code, no output, and no failure of the sandbox itself."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, serving
from test_server_commands import children_of, started

import sandmill
from sandmill.errors import ExecFailed

BOMB = """
import os, time
while True:
    try:
        os.fork() or time.sleep(99)
    except OSError:
        time.sleep(0.01)
"""


def test_no_process_left_in_a_sandbox(clean: Server) -> None:
    clean.box("full")
    started(clean, "full", "python3", "-c", BOMB)
    deadline = time.monotonic() + 20
    while (refused := clean.run("full", "true"))["status"].get("reason") != "ResourceExhausted":
        assert time.monotonic() < deadline, refused
    status = refused["status"]
    assert (status["phase"], status["errno"], "exitCode" in status) == ("Failed", "EAGAIN", False)
    assert "no more processes" in status["message"]
    assert clean.output(refused["metadata"]["name"]) == b""
    assert clean.ask("DELETE", "sandboxes/full/processes").status == 200
    assert clean.run("full", "true")["status"]["exitCode"] == 0


def test_no_process_left_in_an_embedded_sandbox() -> None:
    with sandmill.Sandbox.create(memory="256Mi", disk="32Mi") as box:
        box.exec("python3", "-c", BOMB)
        deadline = time.monotonic() + 20

        def until_refused() -> None:
            while time.monotonic() < deadline:
                box.run("true")

        with pytest.raises(ExecFailed, match="no more processes") as failure:
            until_refused()
        assert failure.value.errno == 11
        box.kill_processes()
        assert box.run("true").exit_code == 0


def test_no_disk_left_in_a_sandbox(clean: Server) -> None:
    clean.box("small", resources={"memory": "256Mi", "disk": "4Mi"})
    refused = clean.ask("PUT", "sandboxes/small/files?path=/workspace/f", b"x" * (8 << 20), {"Content-Type": "application/octet-stream"})
    assert (refused.status, refused.json["reason"]) == (503, "CapacityUnavailable")
    assert refused.json["details"]["causes"][0]["reason"] == "ENOSPC"
    assert clean.run("small", "true")["status"]["exitCode"] == 0


@contextlib.contextmanager
def no_more_processes(pid: int) -> Iterator[None]:
    """A warden that may not fork any more, as on a machine whose process table is full."""
    controller = Path("/sys/fs/cgroup/pids")
    base = controller if (controller / "cgroup.procs").exists() else Path("/sys/fs/cgroup")
    group = base / f"sandmill-test-{os.getpid()}"
    own = next(
        line.rpartition(":")[2]
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        if base == Path("/sys/fs/cgroup") or ":pids:" in line
    )
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "pids.max").write_text("1")
        yield
    finally:
        (base / own.lstrip("/") / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def test_no_process_left_on_the_machine(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.box("before")
        server.until("sandboxes/before", phase="Running")
        (warden,) = children_of(server.process.pid)
        with no_more_processes(warden):
            server.box("refused")
            stopped = server.until("sandboxes/refused", phase="Stopped")["status"]
            assert stopped["stopReason"] == "CapacityUnavailable"
            assert "Resource temporarily unavailable" in stopped["message"]
            again = server.ask("POST", "sandboxes/refused/processes", {"spec": {"command": ["true"]}})
            assert (again.status, again.json["reason"], again.headers["retry-after"]) == (503, "CapacityUnavailable", "5")
            assert server.run("before", "true")["status"]["exitCode"] == 0
        assert server.run("refused", "true")["status"]["exitCode"] == 0
