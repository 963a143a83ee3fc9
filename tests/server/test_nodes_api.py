"""Nodes over the wire: who may, what is refused, caps, turns, tables."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NODES, SANDMILL, Head, eventually, heading
from server_process import NODUS
from test_server_commands import MERGE

from sandmill.server.keys import Keys

EPHEMERAL = {"mode": "Ephemeral"}
SMALL = {"resources": {"memory": "64Mi", "disk": "16Mi"}, "continuity": EPHEMERAL}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head without sandboxes of its own that waits two seconds for room, and a node that takes two."""
    with heading(tmp_path_factory.mktemp("head"), "--no-local", "--room-wait", "2s") as head:
        head.join("a", "--max-sandboxes", "2", "--label", "rack=r1")
        yield head


@pytest.fixture
def clean(head: Head) -> Iterator[Head]:
    yield head
    for project in ("default", "greedy", "modest"):
        head.ask("DELETE", f"/apis/nodus.dev/v1/namespaces/{project}/sandboxes")
    head.until(f"{NODES}/a", sandboxes=0)


def beat(**changes: Any) -> dict[str, Any]:
    amounts = {"cpu": 4, "memory_bytes": 1 << 33, "disk_bytes": 1 << 33, "pids": 30_000}
    machine = {"architecture": "amd64", "capacity": amounts, "free": amounts, "load": 0.5}
    whole = {"version": 1, "epoch": "e1", "url": "http://127.0.0.1:9", "key": "k" * 32, "program": "0.1", "machine": machine, "most": 5}
    return whole | {"rootless": False, "labels": {}, "images": [], "sandboxes": {}} | changes


def test_who_may(head: Head) -> None:
    keys = Keys(head.folder / "state")
    project, node, other = keys.make("p", ("default",)), head.node_key, keys.make("other-nodes", role="node")

    def ask(key: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
        answer = head.ask(method, path, body, {"Authorization": f"Bearer {key}"} | (MERGE if method == "PATCH" else {}))
        return answer.status, answer.json.get("reason", "")

    forbidden = (403, "Forbidden")
    for method, path, body in (
        ("GET", NODES, None),
        ("GET", f"{NODES}?watch=true&timeoutSeconds=1", None),
        ("GET", f"{NODES}/a", None),
        ("PATCH", f"{NODES}/a", {"spec": {"state": "Draining"}}),
        ("DELETE", f"{NODES}/a", None),
        ("POST", f"{NODES}/a/beats", beat()),
    ):
        assert ask(project, method, path, body) == forbidden, (method, path)
    assert ask(head.key, "POST", f"{NODES}/b/beats", beat()) == forbidden
    assert ask(other, "POST", f"{NODES}/a/beats", beat()) == forbidden
    for path in ("sandboxes", NODES, f"{NODES}/a", "/apis", "/auth/whoami", "/apis/nodus.dev/v1/events", "sandboxes/x/kept"):
        assert ask(node, "GET", path) == forbidden, path
    assert ask(node, "POST", "sandboxes", {"metadata": {"name": "x"}, "spec": {}}) == forbidden
    assert ask(head.key, "GET", "sandboxes/x/kept") == forbidden
    events = head.ask("GET", "/apis/nodus.dev/v1/events", None, {"Authorization": f"Bearer {project}"}).json["items"]
    assert not [event for event in events if event["involvedObject"]["kind"] == "Node"]
    assert [event for event in head.ask("GET", "/apis/nodus.dev/v1/events").json["items"] if event["involvedObject"]["kind"] == "Node"]
    assert head.until(f"{NODES}/a", phase="Ready")["spec"]["state"] == "Ready"


def test_a_node_lets_only_its_head_in(head: Head) -> None:
    for key in (head.key, head.node_key, ""):
        connection = http.client.HTTPConnection(head.nodes[0].url.removeprefix("http://"), timeout=10)
        connection.request("GET", "/apis", headers={"Authorization": f"Bearer {key}"})
        assert connection.getresponse().status == 401
        connection.close()


def test_what_is_no_beat(head: Head) -> None:
    def ask(body: Any, name: str = "new") -> Any:
        answer = head.ask("POST", f"{NODES}/{name}/beats", body, {"Authorization": f"Bearer {head.node_key}"})
        return answer.status, answer.json["reason"]

    for body in (b"{", b"[]", b"\xff", {}, {"version": 1}, beat(most="many"), beat(extra=1), beat(sandboxes=[1]), beat(machine={})):
        assert ask(body) == (400, "BadRequest"), body
    assert ask(beat(version=2)) == (422, "Unsupported")
    machine = beat()["machine"]
    for part in ({"load": -1}, {"architecture": "\u001b[31m"}, {"free": machine["free"] | {"cpu": -1}}):
        assert ask(beat(machine=machine | part)) == (400, "BadRequest"), part
    assert ask(beat(labels={"not a label": "x"})) == (422, "Invalid")
    assert ask(beat(url="ftp://x")) == (422, "Invalid")
    assert ask(beat(uid="none of ours")) == (404, "NotFound")
    assert ask(beat(), "local") == (409, "Conflict")
    assert ask(beat(), "No-Name") == (422, "Invalid")
    assert [item["metadata"]["name"] for item in head.ask("GET", NODES).json["items"]] == ["a"]


def test_a_spec_that_cannot_be(head: Head) -> None:
    for spec in ({"state": "Gone"}, {"drainTimeout": "soon"}, {"other": 1}):
        answer = head.ask("PATCH", f"{NODES}/a", {"spec": spec}, MERGE)
        assert (answer.status, answer.json["reason"]) == (422, "Invalid")
        assert answer.json["details"]["causes"][0]["field"] == f"spec.{next(iter(spec))}"
    assert head.ask("PATCH", f"{NODES}/none", {"spec": {"state": "Draining"}}, MERGE).status == 404
    assert head.ask("POST", NODES, {"metadata": {"name": "x"}}).status == 405


def test_a_full_node_is_waited_for_and_then_refused(clean: Head) -> None:
    for name in ("one", "two"):
        clean.up(name, **SMALL)
    clean.box("three", **SMALL)
    stopped = clean.until("sandboxes/three", phase="Stopped")["status"]
    assert stopped["stopReason"] == "CapacityUnavailable"
    assert "holds 2 sandboxes" in stopped["message"]
    refused = clean.ask("POST", "sandboxes/three/processes", {"spec": {"command": ["true"]}})
    assert (refused.status, refused.json["reason"], refused.headers["retry-after"]) == (503, "CapacityUnavailable", "5")
    clean.ask("DELETE", "sandboxes/one")
    assert clean.run("three", "true")["status"]["exitCode"] == 0


def test_a_project_that_asks_for_many_starves_none(clean: Head) -> None:
    def path(project: str) -> str:
        return f"/apis/nodus.dev/v1/namespaces/{project}/sandboxes"

    for name in ("one", "two"):
        clean.up(name, **SMALL)
    for number in range(8):
        body = {"metadata": {"name": f"g{number}"}, "spec": SMALL}
        assert clean.ask("POST", path("greedy"), body).status == 201
    assert clean.ask("POST", path("modest"), {"metadata": {"name": "m"}, "spec": SMALL}).status == 201
    for name in ("one", "two"):
        clean.ask("DELETE", f"sandboxes/{name}")
    eventually(lambda: clean.ask("GET", path("modest") + "/m").json["status"]["phase"] == "Running", 10)
    running = [item for item in clean.ask("GET", path("greedy")).json["items"] if item["status"]["phase"] == "Running"]
    assert len(running) == 1


def test_tables_and_lists(head: Head) -> None:
    wide = subprocess.run([NODUS, "get", "nodes", "-o", "wide"], capture_output=True, text=True, timeout=60, env=head.environment)
    assert "http://127.0.0.1:" in wide.stdout, wide
    described = subprocess.run([NODUS, "describe", "node", "a"], capture_output=True, text=True, timeout=60, env=head.environment)
    assert "rack=r1" in described.stdout, described
    listed = head.cli("ls").splitlines()
    assert listed[0].split()[:3] == ["NAME", "PHASE", "SANDBOXES"]
    assert listed[1].split()[:3] == ["a", "Ready", "0"]
    node = json.loads(head.cli("ls", "--json"))[0]
    assert node["status"]["capacity"]["sandboxes"] == "2"


def test_a_server_without_any_place_says_so(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local") as alone:
        refused = alone.ask("POST", "sandboxes", {"metadata": {"name": "x"}, "spec": {}})
        assert (refused.status, refused.json["reason"]) == (503, "CapacityUnavailable")
        assert "sandmill node join" in refused.json["message"]
        assert alone.ask("GET", "sandboxes/x").status == 404


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:9",), "cannot be reached"),
        (("ftp://x",), "no server's URL"),
        (("http://10.9.8.7:1",), "--host"),
        (("http://127.0.0.1:9", "--name", "No Name"), "no node's name"),
        (("http://127.0.0.1:9", "--label", "x"), "KEY=VALUE"),
        (("http://127.0.0.1:9", "--key-file", "/nowhere"), "cannot be read"),
        (("http://127.0.0.1:9", "--host", "999.1.1.1"), "999.1.1.1"),
    ],
)
def test_a_join_that_cannot_be(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    environment = {**os.environ, "SANDMILL_STATE": str(tmp_path), "SANDMILL_API_KEY": "k" * 32}
    done = subprocess.run(
        [*SANDMILL, "node", "join", *words, "--state", str(tmp_path / "state")], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 2, done
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
