"""Forks, freezing and refusals through the API: all or none, once per key, billed, and told after the end."""

from __future__ import annotations

import concurrent.futures
import json
from decimal import Decimal

import pytest
from server_process import Server, serving

PATCH = {"Content-Type": "application/merge-patch+json"}


def said(server: Server, box: str, script: str) -> str:
    return server.output(server.run(box, "sh", "-c", script)["metadata"]["name"]).decode()


def fork(server: Server, box: str, count: int, key: str | None = None, **more: str) -> list[str]:
    answer = server.ask("POST", f"sandboxes/{box}/fork", {"count": count, **more}, {} if key is None else {"Idempotency-Key": key})
    assert answer.status == 201, answer.body
    return [item["metadata"]["name"] for item in answer.json["items"]]


def stop(server: Server, box: str) -> dict[str, object]:
    server.ask("PATCH", f"sandboxes/{box}", {"spec": {"state": "Stopped"}}, PATCH)
    return server.until(f"sandboxes/{box}", phase="Stopped")["status"]


def test_forks_are_sandboxes_of_their_own(clean: Server) -> None:
    clean.ask("POST", "secrets", {"metadata": {"name": "tok"}, "spec": {"stringData": {"KEY": "s3cret"}}})
    clean.box("a", secrets=["tok"], maxCostUSD="1.00", command=["sh", "-c", "echo ran >> ~/main; sleep 60"])
    clean.until("sandboxes/a", phase="Running")
    assert said(clean, "a", "until [ -s ~/main ]; do sleep 0.01; done; echo w > w; cat ~/main") == "ran\n"
    names = fork(clean, "a", 3, generateName="twin-")
    assert all(name.startswith("twin-") for name in names)
    for number, name in enumerate(names):
        assert said(clean, name, f"cat w ~/main; echo $KEY; cat /run/secrets/tok/KEY; echo {number} > w") == "w\nran\ns3cret\ns3cret"
        status = clean.ask("GET", f"sandboxes/{name}").json["status"]
        assert (status["phase"], status["forkedFrom"]["name"], status["cost"]["limitUSD"]) == ("Running", "a", "1.00")
    assert said(clean, "a", "cat w") == "w\n"
    stop(clean, names[1])
    assert said(clean, names[1], "cat w") == "1\n"
    assert Decimal(clean.ask("GET", f"sandboxes/{names[1]}").json["status"]["cost"]["totalUSD"]) < Decimal("0.01")
    clean.ask("DELETE", f"sandboxes/{names[1]}")
    objects = {item["object"]["name"] for item in clean.ask("GET", "/apis/nodus.dev/v1/usagerecords").json["items"]}
    assert names[1] in objects


def test_the_same_key_forks_once(clean: Server) -> None:
    clean.box("a")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: tuple(fork(clean, "a", 2, key="once")), range(4)))
    assert len(set(made)) == 1
    assert len(clean.ask("GET", "sandboxes").json["items"]) == 3
    other = clean.ask("POST", "sandboxes/a/fork", {"count": 3}, {"Idempotency-Key": "once"})
    assert (other.status, other.json["reason"]) == (409, "IdempotencyKeyReused")


def test_forks_are_all_or_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("few"), "--max-running", "3") as server:
        server.box("a")
        server.run("a", "true")
        refused = server.ask("POST", "sandboxes/a/fork", {"count": 3})
        assert (refused.status, refused.json["reason"], "Retry-After" in {key.title() for key in refused.headers}) == (
            429,
            "QuotaExceeded",
            True,
        )
        assert len(server.ask("GET", "sandboxes").json["items"]) == 1
        assert len(fork(server, "a", 2)) == 2


def test_a_fork_wakes_a_stopped_sandbox(clean: Server) -> None:
    clean.box("a")
    said(clean, "a", "echo kept > w")
    stop(clean, "a")
    (name,) = fork(clean, "a", 1)
    assert said(clean, name, "cat w") == "kept\n"
    assert clean.ask("GET", "sandboxes/a").json["status"]["phase"] == "Running"


def test_forks_are_lost_with_their_server_and_say_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("killed")) as server:
        server.box("a", continuity={"mode": "Ephemeral"})
        server.run("a", "true")
        names = fork(server, "a", 2)
        server.kill()
        server.start()
        for name in ("a", *names):
            assert server.ask("GET", f"sandboxes/{name}").json["status"]["stopReason"] == "NodeLost"


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({}, "count", "must be given"),
        ({"count": 0}, "count", "from 1 to 256"),
        ({"count": 257}, "count", "from 1 to 256"),
        ({"count": "2"}, "count", "whole number"),
        ({"count": 1, "generateName": "-x"}, "generateName", "lower-case"),
        ({"count": 1, "counts": 1}, "counts", "did you mean 'count'"),
    ],
)
def test_a_fork_that_makes_no_sense(clean: Server, body: object, field: str, said: str) -> None:
    clean.box("a")
    answer = clean.ask("POST", "sandboxes/a/fork", body)
    causes = {cause["field"]: cause["message"] for cause in answer.json["details"]["causes"]}
    assert (answer.status, said in causes[field]) == (422, True)


def test_what_is_not_there_or_not_up(clean: Server) -> None:
    for sub in ("fork", "freeze", "thaw"):
        assert clean.ask("POST", f"sandboxes/nobody/{sub}", {"count": 1} if sub == "fork" else {}).status == 404
    assert clean.ask("GET", "sandboxes/nobody/blocked").status == 404
    clean.box("a", state="Stopped")
    refused = clean.ask("POST", "sandboxes/a/freeze", {})
    assert (refused.status, refused.json["reason"]) == (409, "SandboxNotRunning")
    assert clean.ask("GET", "sandboxes/a/blocked").json == {"items": []}


def test_a_frozen_sandbox_is_seen_to_be_and_keeps_its_workspace(clean: Server) -> None:
    clean.box("a")
    said(clean, "a", "echo w > w")
    version = clean.ask("GET", "sandboxes").json["metadata"]["resourceVersion"]
    assert clean.ask("POST", "sandboxes/a/freeze", {}).json["status"]["frozen"] is True
    lines = clean.ask("GET", f"sandboxes?watch=true&resourceVersion={version}&timeoutSeconds=1").body.splitlines()
    assert any(event["object"]["status"].get("frozen") for event in map(json.loads, lines))
    assert clean.run("a", "true")["status"]["errno"] == "EBUSY"
    assert clean.ask("GET", "sandboxes/a/files?path=w").body == b"w\n"
    assert clean.ask("PUT", "sandboxes/a/files?path=x&mode=0755", b"x").json["reason"] == "Conflict"
    assert "frozen" not in stop(clean, "a")
    assert said(clean, "a", "cat w") == "w\n"


def test_refusals_are_told_after_the_end_and_a_restart(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("refused")) as server:
        server.box("a", network={"egress": {"policy": "AllowList", "allow": ["example.org"]}})
        said(server, "a", "python3 -c \"import socket; socket.gethostbyname('b.org')\"")
        live = server.ask("GET", "sandboxes/a/blocked").json["items"]
        assert [(item["host"], item["port"]) for item in live] == [("b.org", 53)]
        stop(server, "a")
        assert server.ask("GET", "sandboxes/a/blocked").json["items"] == live
        assert server.stop() == 0
        server.start()
        assert server.ask("GET", "sandboxes/a/blocked").json["items"] == live
