"""Nodes and heads that die, fall silent, come back, are drained and removed: no sandbox is forgotten, none runs unseen."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import NODES, Head, NodeProcess, eventually, heading
from test_server_commands import MERGE, children_of, started
from test_server_crash import alive, left

EPHEMERAL = {"mode": "Ephemeral"}


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """A head with a short lease and no sandboxes of its own."""
    with heading(tmp_path, "--no-local", "--node-lease", "5s") as head:
        yield head


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Head]:
    """A head whose nodes wait for it to come back."""
    with heading(tmp_path, "--no-local", "--node-lease", "30s") as head:
        yield head


def belongings(node: NodeProcess) -> tuple[list[int], list[str], list[Path]]:
    """Processes, control groups and folders of a node's sandboxes."""
    pids = [pid for warden in children_of(node.process.pid) for pid in (warden, *children_of(warden))]
    owners = list((node.folder / "sandboxes" / "owners").iterdir())
    groups = [group for owner in owners for group in json.loads((owner / "owner.json").read_text())["cgroups"]]
    return pids, groups, owners


def inits(node: NodeProcess) -> list[int]:
    """The in-sandbox init processes of a node."""
    return [pid for warden in children_of(node.process.pid) for pid in children_of(warden)]


def usage(head: Head, box: str) -> list[float]:
    """Billed seconds of each run of a sandbox."""
    found = head.ask("GET", f"/apis/nodus.dev/v1/usagerecords?fieldSelector=object.name%3D{box}").json["items"]
    return [float(one["quantity"]) for one in found]


def test_a_killed_head_takes_its_sandboxes_up_again(patient: Head) -> None:
    node = patient.join("a")
    before = patient.up("steady", continuity=EPHEMERAL)
    script = "for i in $(seq 1 12); do echo $i; echo e$i >&2; sleep 0.4; done; read line; echo got $line; exit 3"
    name = started(patient, "steady", "bash", "-c", script, stdin=True)
    forgotten = started(patient, "steady", "true")
    patient.ask("GET", f"processes/{forgotten}?wait=10s")
    assert patient.ask("POST", f"processes/{name}/stdin", {"seq": 1, "data": "b25l"}).status == 200  # "one", no newline yet
    patient.ask("GET", f"processes/{name}/output?after=6&wait=10s")
    time.sleep(0.3)
    patient.kill()
    time.sleep(1)
    patient.start()
    assert patient.run("steady", "echo", "still here")["status"]["exitCode"] == 0
    after = patient.until("sandboxes/steady", phase="Running")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["startTime"] == before["status"]["startTime"]
    assert (
        patient.ask("POST", f"processes/{name}/stdin", {"seq": 1, "data": "IHR3bwo="}).status == 200
    )  # " two\n": a new server counts anew
    ended = patient.ask("GET", f"processes/{name}?wait=30s").json["status"]
    assert (ended["phase"], ended.get("exitCode")) == ("Failed", 3), ended
    assert patient.output(name) == b"".join(b"%d\n" % i for i in range(1, 13)) + b"got one two\n"
    assert patient.output(name, "stderr") == b"".join(b"e%d\n" % i for i in range(1, 13))
    assert len(inits(node)) == 1
    assert patient.ask("DELETE", "sandboxes/steady").status == 200
    assert len(usage(patient, "steady")) == 1
    assert usage(patient, "steady")[0] > 3
    eventually(lambda: not inits(node))


def test_what_a_killed_head_was_making_is_not_left_on_the_node(patient: Head) -> None:
    node = patient.join("a")
    for round in range(3):
        for number in range(4):
            patient.ask("POST", "sandboxes", {"metadata": {"name": f"r{round}-{number}"}, "spec": {"resources": {"memory": "64Mi"}}})
        time.sleep(0.004 * round)
        patient.kill()
        patient.start()
    wanted = {f"r{round}-{number}" for round in range(3) for number in range(4)}
    assert {item["metadata"]["name"] for item in patient.ask("GET", "sandboxes").json["items"]} <= wanted

    def true() -> bool:
        items = patient.ask("GET", "sandboxes").json["items"]
        phases = {item["status"]["phase"] for item in items}
        return phases <= {"Running"} and len(inits(node)) == len(items)

    eventually(true, 30)


def test_a_killed_node_is_lost_with_what_it_held(head: Head) -> None:
    node, spare = head.join("a"), head.join("b")
    boxes = {f"box-{number}": head.up(f"box-{number}", continuity=EPHEMERAL) for number in range(4)}
    there = sorted(name for name in boxes if head.place(name) == "a")
    assert len(there) == 2
    name = started(head, there[0], "sh", "-c", "echo partial; sleep 99")
    head.ask("GET", f"processes/{name}/output?wait=10s")
    pids, groups, owners = belongings(node)
    node.kill()
    killed_at = time.monotonic()
    assert not left(pids, [], [])
    lost = head.until(f"sandboxes/{there[0]}", phase="Failed")["status"]
    assert (lost["reason"], lost["stopReason"]) == ("NodeLost", "NodeLost")
    assert "node a" in lost["message"]
    assert time.monotonic() - killed_at < 12
    ended = head.until(f"processes/{name}", phase="Failed")["status"]
    assert (ended["reason"], "exitCode" in ended) == ("NodeLost", False)
    assert head.output(name) == b"partial\n"
    assert len(usage(head, there[0])) == 1
    assert node.object["status"]["phase"] == "Lost"
    for other in set(boxes) - set(there):
        assert head.run(other, "true")["status"]["exitCode"] == 0
    node.start()  # sweeps the dead one's folder
    assert not left([], groups, owners)
    node.until(phase="Ready", sandboxes=0)
    head.up("fresh")
    assert head.place("fresh") == "a"
    assert len(inits(spare)) == 2


def test_a_node_that_restarts_at_once_has_lost_its_sandboxes(head: Head) -> None:
    node = head.join("a")
    head.up("gone", continuity=EPHEMERAL)
    node.kill()
    node.start()
    assert head.until("sandboxes/gone", phase="Failed")["status"]["reason"] == "NodeLost"
    head.up("new")
    assert len(inits(node)) == 1


def test_a_node_that_stood_still_ends_what_it_was_given(head: Head) -> None:
    node = head.join("a")
    head.up("unseen", continuity=EPHEMERAL)
    name = started(head, "unseen", "sleep", "99")
    epoch = node.object["status"]["epoch"]
    pids = inits(node)
    node.process.send_signal(signal.SIGSTOP)
    seen = time.time()
    assert head.until("sandboxes/unseen", phase="Failed")["status"]["reason"] == "NodeLost"
    assert head.until(f"processes/{name}", phase="Failed")["status"]["reason"] == "NodeLost"
    assert usage(head, "unseen")[0] < time.time() - seen + 5
    node.process.send_signal(signal.SIGCONT)
    assert not left(pids, [], [])
    eventually(lambda: node.object["status"]["phase"] == "Ready" and node.object["status"]["epoch"] != epoch)
    head.up("again")
    assert len(inits(node)) == 1


def test_a_node_that_hears_nothing_ends_its_sandboxes(head: Head) -> None:
    node = head.join("a")
    head.up("alone", continuity=EPHEMERAL)
    pids = inits(node)
    head.process.send_signal(signal.SIGSTOP)
    eventually(lambda: not any(map(alive, pids)), 15)
    head.process.send_signal(signal.SIGCONT)
    assert head.until("sandboxes/alone", phase="Failed")["status"]["reason"] == "NodeLost"
    node.until(phase="Ready", sandboxes=0)


def test_a_dead_init_there_is_a_lost_sandbox_here(head: Head) -> None:
    node = head.join("a")
    head.up("headless", continuity=EPHEMERAL)
    name = started(head, "headless", "sh", "-c", "echo before; sleep 99")
    head.ask("GET", f"processes/{name}/output?wait=10s")
    (init,) = inits(node)
    os.kill(init, signal.SIGKILL)
    stopped = head.until("sandboxes/headless", phase="Stopped")["status"]
    assert stopped["stopReason"] == "SandboxLost"
    ended = head.until(f"processes/{name}", phase="Failed")["status"]
    assert (ended["reason"], "exitCode" in ended) == ("SandboxLost", False)
    assert head.output(name) == b"before\n"


def test_a_drain_moves_what_can_be_saved(head: Head) -> None:
    node = head.join("a")
    head.up("saved")
    head.run("saved", "sh", "-c", "echo precious > f")
    head.up("passing", continuity=EPHEMERAL)
    head.cli("drain", "a", "--deadline", "4s")
    stopped = head.until("sandboxes/saved", phase="Stopped")["status"]
    assert stopped["stopReason"] == "NodeDrained"
    assert head.run("passing", "true")["status"]["exitCode"] == 0
    refused = head.ask("POST", "sandboxes", {"metadata": {"name": "no"}, "spec": {}})
    assert (refused.status, refused.json["reason"], "retry-after" in refused.headers) == (503, "CapacityUnavailable", True)
    other = head.join("b")
    look = head.run("saved", "cat", "f")
    assert head.output(look["metadata"]["name"]) == b"precious\n"
    assert head.place("saved") == "b"
    assert head.until("sandboxes/passing", phase="Stopped")["status"]["stopReason"] == "NodeDrained"
    node.until(phase="Draining", sandboxes=0)
    head.cli("resume", "a")
    node.until(phase="Ready")
    head.cli("drain", "b", "--wait")
    assert other.object["status"]["sandboxes"] == 0


def test_a_node_that_is_asked_to_end_takes_its_leave(head: Head) -> None:
    node = head.join("a")
    head.up("saved")
    head.run("saved", "sh", "-c", "echo precious > f")
    pids, groups, owners = belongings(node)
    assert node.stop() == 0
    assert not left(pids, groups, owners)
    assert head.ask("GET", "sandboxes/saved").json["status"]["stopReason"] == "NodeDrained"
    assert node.object["status"]["phase"] == "Left"
    head.join("b")
    look = head.run("saved", "cat", "f")
    assert head.output(look["metadata"]["name"]) == b"precious\n"


def test_a_removed_node_ends(head: Head) -> None:
    node = head.join("a")
    head.up("held", continuity=EPHEMERAL)
    assert head.ask("DELETE", f"{NODES}/a").status == 409
    assert head.ask("DELETE", "sandboxes/held").status == 200
    head.cli("remove", "a")
    assert head.ask("GET", f"{NODES}/a").status == 404
    assert node.over() == 7
    assert "no longer wants this node" in node.errors


def test_one_name_is_one_process(head: Head, tmp_path: Path) -> None:
    first = head.join("a")
    head.up("first", continuity=EPHEMERAL)
    second = NodeProcess.__new__(NodeProcess)
    second.head, second.name, second.folder, second._options = head, "a", tmp_path / "second", ()
    head.nodes.append(second)
    second.start()
    assert first.over() == 7
    assert head.until("sandboxes/first", phase="Failed")["status"]["reason"] == "NodeLost"
    second.until(phase="Ready", sandboxes=0)


def test_a_head_and_its_node_both_die(head: Head) -> None:
    node = head.join("a")
    head.up("both", continuity=EPHEMERAL)
    name = started(head, "both", "sleep", "99")
    node.kill()
    head.kill()
    head.start()
    assert head.ask("GET", "sandboxes/both").json["status"]["phase"] in ("Recovering", "Failed")
    assert head.until("sandboxes/both", phase="Failed")["status"]["reason"] == "NodeLost"
    assert head.until(f"processes/{name}", phase="Failed")["status"]["reason"] == "NodeLost"
    assert len(usage(head, "both")) == 1


def test_a_deletion_during_recovery_is_carried_out(patient: Head) -> None:
    node = patient.join("a")
    patient.up("doomed", continuity=EPHEMERAL)
    node.process.send_signal(signal.SIGSTOP)
    patient.kill()
    patient.start()
    patient.ask("PATCH", "sandboxes/doomed", {"spec": {"state": "Stopped"}}, MERGE)
    node.process.send_signal(signal.SIGCONT)
    patient.ask("DELETE", "sandboxes/doomed")
    patient.gone("sandboxes/doomed", 20)
    eventually(lambda: not inits(node))


def test_what_a_killed_node_was_making_is_made_elsewhere(head: Head) -> None:
    node, other = head.join("a"), head.join("b")
    for number in range(24):
        head.box(f"m{number}", continuity=EPHEMERAL, resources={"memory": "64Mi", "disk": "16Mi"})
        if number == 12:
            node.process.kill()
    node.over()
    node.until(phase="Lost")

    def true() -> bool:
        items = head.ask("GET", "sandboxes").json["items"]
        up = [item for item in items if item["status"]["phase"] == "Running"]
        lost = [item for item in items if item["status"].get("reason") == "NodeLost"]
        return len(up) + len(lost) == 24 and len(inits(other)) == len(up) > 11

    eventually(true, 30)
