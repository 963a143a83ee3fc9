"""kill -9 of the server at bad moments: nothing is left, and the next one knows the truth."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from server_process import Server, serving
from test_server_commands import children_of, inits_of, started

MERGE = {"Content-Type": "application/merge-patch+json"}


def belongings(server: Server) -> tuple[list[int], list[str], list[Path]]:
    """Processes, control groups and folders of a server's sandboxes."""
    pids = [pid for warden in children_of(server.process.pid) for pid in (warden, *children_of(warden))]
    owners = list((server.folder / "sandboxes" / "owners").iterdir())
    groups = [group for owner in owners for group in json.loads((owner / "owner.json").read_text())["cgroups"]]
    return pids, groups, owners


def alive(pid: int) -> bool:
    """It runs still; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left(pids: list[int], groups: list[str], owners: list[Path]) -> list[object]:
    """What is still there after five seconds."""
    deadline = time.monotonic() + 5
    while True:
        found = [*filter(alive, pids), *(group for group in groups if Path(group).exists()), *(f for f in owners if f.exists())]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


@pytest.fixture
def victim(tmp_path: Path) -> Server:
    with serving(tmp_path) as server:
        yield server  # type: ignore[misc]


def test_everything_dies_with_the_server_and_the_next_one_knows(victim: Server) -> None:
    victim.box("saved", maxCostUSD="5.00")
    victim.run("saved", "sh", "-c", "echo old > f")
    victim.ask("PATCH", "sandboxes/saved", {"spec": {"state": "Stopped"}}, MERGE)
    victim.until("sandboxes/saved", phase="Stopped")
    victim.ask("PATCH", "sandboxes/saved", {"spec": {"state": "Running"}}, MERGE)
    victim.until("sandboxes/saved", phase="Running")
    victim.run("saved", "sh", "-c", "echo new > f")
    victim.box("fresh")
    victim.box("resting", state="Stopped")
    name = started(victim, "fresh", "sh", "-c", "echo partial; (setsid sleep 99 &); sleep 99")
    victim.ask("GET", f"processes/{name}/output?wait=10s")
    time.sleep(1.2)  # a heartbeat and the flush of output
    pids, groups, owners = belongings(victim)
    assert len(pids) >= 3
    victim.kill()
    assert not left(pids, [], [])
    victim.start()
    assert not left(pids, groups, owners)

    lost = victim.ask("GET", "sandboxes/fresh").json["status"]
    assert (lost["phase"], lost["reason"]) == ("Failed", "NodeLost")
    ended = victim.ask("GET", f"processes/{name}").json["status"]
    assert (ended["phase"], ended["reason"], "exitCode" in ended) == ("Failed", "NodeLost", False)
    assert victim.output(name) == b"partial\n"
    refused = victim.ask("POST", "sandboxes/fresh/processes", {"spec": {"command": ["true"]}})
    assert (refused.status, refused.json["reason"]) == (409, "SandboxFailed")

    saved = victim.ask("GET", "sandboxes/saved").json["status"]
    assert (saved["phase"], saved["stopReason"], saved["activity"]) == ("Stopped", "NodeLost", "Idle")
    refused = victim.ask("POST", "sandboxes/saved/processes", {"spec": {"command": ["true"]}})
    assert (refused.status, refused.json["reason"]) == (409, "SandboxNotRunning")  # what was written since is gone: nobody may miss that
    start = {"metadata": {"annotations": {"nodus.dev/start-requested-at": "2026-11-29T00:00:00Z"}}}
    assert victim.ask("PATCH", "sandboxes/saved", start, MERGE).status == 200
    look = victim.run("saved", "cat", "f")
    assert victim.output(look["metadata"]["name"]) == b"old\n"
    assert victim.ask("GET", "sandboxes/resting").json["status"]["phase"] == "Stopped"
    usage = victim.ask("GET", "/apis/nodus.dev/v1/usagerecords?fieldSelector=object.name%3Dfresh").json["items"]
    assert len(usage) == 1
    assert 0 < float(usage[0]["quantity"]) < 30


def test_a_command_is_never_run_again(victim: Server) -> None:
    victim.box("once")
    body, key = {"spec": {"command": ["sh", "-c", "echo x; sleep 99"]}}, {"Idempotency-Key": "crash-1"}
    first = victim.ask("POST", "sandboxes/once/processes", body, key)
    victim.kill()
    victim.start()
    again = victim.ask("POST", "sandboxes/once/processes", body, key)
    assert (again.status, again.json["metadata"]["uid"]) == (201, first.json["metadata"]["uid"])
    assert victim.ask("GET", f"processes/{first.json['metadata']['name']}").json["status"]["phase"] == "Failed"


def test_killed_while_it_creates_stops_and_deletes(victim: Server) -> None:
    """Ten rounds, each killed a few milliseconds later than the one before."""
    for round in range(10):
        for number in range(3):
            victim.ask("POST", "sandboxes", {"metadata": {"name": f"r{round}-{number}"}, "spec": {"resources": {"memory": "256Mi"}}})
        victim.ask("PATCH", f"sandboxes/r{round}-0", {"spec": {"state": "Stopped"}}, MERGE)
        with contextlib.suppress(OSError):
            victim.ask("DELETE", f"sandboxes/r{max(0, round - 1)}-1", timeout=0.001 + round * 0.004)
        pids, groups, owners = belongings(victim)
        victim.kill()
        victim.start()
        assert not left(pids, groups, owners)
        found = victim.ask("GET", "sandboxes").json["items"]
        up = {item["metadata"]["name"] for item in found if item["status"]["phase"] == "Running"}
        deadline = time.monotonic() + 10
        while True:  # those that were promised and not yet begun are begun now
            found = victim.ask("GET", "sandboxes").json["items"]
            phases = {item["metadata"]["name"]: item["status"]["phase"] for item in found}
            up = {name for name, phase in phases.items() if phase == "Running"}
            if set(phases.values()) <= {"Running", "Stopped", "Failed"} and len(inits_of(victim.process.pid)) == len(up):
                break
            assert time.monotonic() < deadline, (phases, inits_of(victim.process.pid))
            time.sleep(0.05)


def test_a_shutdown_keeps_what_a_stop_keeps(victim: Server) -> None:
    victim.box("kept")
    victim.run("kept", "sh", "-c", "echo here > f")
    pids, groups, owners = belongings(victim)
    assert victim.stop() == 0
    assert not left(pids, groups, owners)
    victim.start()
    stopped = victim.ask("GET", "sandboxes/kept").json["status"]
    assert (stopped["phase"], stopped["stopReason"]) == ("Stopped", "ServerShutdown")
    look = victim.run("kept", "cat", "f")
    assert victim.output(look["metadata"]["name"]) == b"here\n"


def test_a_client_that_dies_leaves_its_command_running(victim: Server) -> None:
    victim.box("steady")
    name = started(victim, "steady", "sh", "-c", "sleep 0.5; echo done > f")
    child = os.fork()
    if child == 0:
        victim.ask("GET", f"processes/{name}?wait=30s")
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert victim.ask("GET", f"processes/{name}?wait=10s").json["status"]["exitCode"] == 0
