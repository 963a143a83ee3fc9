"""Objects over the wire: what is created, changed, listed and refused, and what repeated requests find."""

from __future__ import annotations

import json
import threading

import pytest
from server_process import Server

MERGE = {"Content-Type": "application/merge-patch+json"}
OPERATIONS = {"Content-Type": "application/json-patch+json"}


def test_defaults_are_written_out(clean: Server) -> None:
    spec = clean.box("plain")["spec"]
    assert spec["image"] == "nodus/agent-tools"
    assert spec["workingDir"] == "/workspace"
    assert spec["lifecycle"] == {"idleTimeout": "5m", "onIdle": "Stop", "maxLifetime": "24h"}
    assert spec["continuity"] == {"mode": "Snapshotted"}
    assert spec["network"] == {"egress": {"policy": "Deny"}}


def test_the_same_idempotency_key_finds_the_first_result(clean: Server) -> None:
    body = {"metadata": {"generateName": "once-"}, "spec": {"resources": {"memory": "256Mi"}}}
    key = {"Idempotency-Key": "objects-1"}
    first, second = clean.ask("POST", "sandboxes", body, key), clean.ask("POST", "sandboxes", body, key)
    assert (first.status, second.status) == (201, 201)
    assert first.json["metadata"] == second.json["metadata"]
    other = clean.ask("POST", "sandboxes", body | {"metadata": {"generateName": "twice-"}}, key)
    assert (other.status, other.json["reason"]) == (409, "IdempotencyKeyReused")


def test_a_repeated_command_runs_once_also_when_both_come_at_once(clean: Server) -> None:
    clean.box("once")
    body, key = {"spec": {"command": ["sh", "-c", "echo x >> ran; sleep 0.2"]}}, {"Idempotency-Key": "objects-2"}
    answers: list[str] = []
    both = [
        threading.Thread(target=lambda: answers.append(clean.ask("POST", "sandboxes/once/processes", body, key).json["metadata"]["name"]))
        for _ in range(4)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(set(answers)) == 1
    clean.ask("GET", f"processes/{answers[0]}?wait=10s")
    assert clean.ask("GET", "sandboxes/once/files?path=ran").body == b"x\n"


def test_a_named_create_reconnects_or_names_the_differences(clean: Server) -> None:
    made = clean.box("named")
    same = clean.ask("POST", "sandboxes", {"metadata": {"name": "named"}, "spec": {"resources": {"memory": "256Mi", "disk": "32Mi"}}})
    assert (same.status, same.json["metadata"]["uid"]) == (200, made["metadata"]["uid"])
    other = clean.ask("POST", "sandboxes", {"metadata": {"name": "named"}, "spec": {"resources": {"memory": "1Gi", "disk": "32Mi"}}})
    assert (other.status, other.json["reason"]) == (409, "AlreadyExists")
    assert other.causes == {"spec.resources.memory": "FieldValueDuplicate"}


def test_dry_run_estimates_and_binds_by_etag(clean: Server) -> None:
    body = {"metadata": {"name": "est"}, "spec": {"resources": {"cpu": "2", "memory": "4Gi"}, "lifecycle": {"maxLifetime": "10h"}}}
    dry = clean.ask("POST", "sandboxes?dryRun=All", body)
    assert dry.json["status"]["estimate"]["rateUSDPerHour"] == "0.0358"
    assert dry.json["status"]["estimate"]["holdUSD"] == "0.358"
    assert clean.ask("GET", "sandboxes/est").status == 404
    stale = clean.ask("POST", "sandboxes", body, {"If-Match": '"0"'})
    assert (stale.status, stale.json["reason"]) == (412, "PreconditionFailed")
    assert clean.ask("POST", "sandboxes", body, {"If-Match": dry.headers["etag"]}).status == 201


def test_patches(clean: Server) -> None:
    clean.box("patched", maxCostUSD="1.00")
    path = "sandboxes/patched"
    merged = clean.ask("PATCH", path, {"metadata": {"labels": {"a": "1", "b": "2"}}, "spec": {"maxCostUSD": "2.00"}}, MERGE).json
    assert (merged["metadata"]["labels"], merged["metadata"]["generation"]) == ({"a": "1", "b": "2"}, 2)
    operated = clean.ask("PATCH", path, [{"op": "remove", "path": "/metadata/labels/a"}], OPERATIONS).json
    assert operated["metadata"]["labels"] == {"b": "2"}
    lowered = clean.ask("PATCH", path, {"spec": {"maxCostUSD": "1.99"}}, MERGE)
    assert (lowered.status, lowered.causes) == (422, {"spec.maxCostUSD": "FieldValueInvalid"})
    assert clean.ask("PATCH", path, {"spec": {"maxCostUSD": None}}, MERGE).status == 422
    fixed = clean.ask("PATCH", path, {"spec": {"resources": {"cpu": "2"}}}, MERGE)
    assert (fixed.status, fixed.json["reason"], fixed.causes) == (409, "FieldImmutable", {"spec.resources.cpu": "FieldImmutable"})
    stale = clean.ask("PATCH", path, {"metadata": {"resourceVersion": "1", "labels": {"c": "3"}}}, MERGE)
    assert (stale.status, stale.json["reason"]) == (409, "Conflict")
    wrong = clean.ask("PATCH", path, [{"op": "test", "path": "/kind", "value": "x"}], OPERATIONS)
    assert wrong.status == 422
    assert clean.ask("PATCH", path, {}, {"Content-Type": "application/strategic-merge-patch+json"}).status == 415


def test_put_replaces(clean: Server) -> None:
    clean.box("put")
    made = clean.until("sandboxes/put", phase="Running")
    made["metadata"]["labels"] = {"x": "y"}
    made["spec"]["lifecycle"]["idleTimeout"] = "10m"
    answer = clean.ask("PUT", "sandboxes/put", made)
    assert (answer.status, answer.json["spec"]["lifecycle"]["idleTimeout"]) == (200, "10m")
    assert (answer.json["metadata"]["labels"], answer.json["status"]["phase"]) == ({"x": "y"}, "Running")
    assert clean.ask("PUT", "sandboxes/put", made).json["reason"] == "Conflict"


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("labelSelector=team%3Da", ["l1"]),
        ("labelSelector=team%21%3Da", ["l2", "l3"]),
        ("labelSelector=team%20in%20(a,b)", ["l1", "l2"]),
        ("labelSelector=team%20notin%20(a,b)", ["l3"]),
        ("labelSelector=!team", ["l3"]),
        ("labelSelector=team,only%3Done", ["l1"]),
        ("fieldSelector=metadata.name%3Dl2", ["l2"]),
        ("fieldSelector=spec.state%3DRunning,metadata.name%21%3Dl1", ["l2"]),
        ("fieldSelector=spec.state%3DStopped", ["l3"]),
    ],
)
def test_selectors(server: Server, selector: str, names: list[str]) -> None:
    for name, labels, state in (("l1", {"team": "a", "only": "one"}, "Running"), ("l2", {"team": "b"}, "Running"), ("l3", {}, "Stopped")):
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"state": state, "resources": {"memory": "256Mi"}}}
        assert server.ask("POST", "/apis/nodus.dev/v1/namespaces/select/sandboxes", body).status in (200, 201)
    found = server.ask("GET", f"/apis/nodus.dev/v1/namespaces/select/sandboxes?{selector}").json
    assert [item["metadata"]["name"] for item in found["items"]] == names


def test_pages(server: Server) -> None:
    base = "/apis/nodus.dev/v1/namespaces/pages/secrets"
    for number in range(7):
        assert server.ask("POST", base, {"metadata": {"name": f"s{number}"}, "spec": {"stringData": {"k": "v"}}}).status in (200, 201, 409)
    names: list[str] = []
    token = ""
    while True:
        page = server.ask("GET", f"{base}?limit=3&continue={token}").json
        names += [item["metadata"]["name"] for item in page["items"]]
        assert len(page["items"]) <= 3
        if not (token := page["metadata"].get("continue", "")):
            break
    assert names == [f"s{number}" for number in range(7)]


def test_secret_values_never_come_back(clean: Server, server: Server) -> None:
    made = clean.ask("POST", "secrets", {"metadata": {"name": "hidden"}, "spec": {"stringData": {"TOKEN": "tell-nobody"}}})
    assert made.json["status"]["keys"] == ["TOKEN"]
    clean.ask("PATCH", "secrets/hidden", {"spec": {"stringData": {"TOKEN": "tell-nobody", "MORE": "tell-nobody"}}}, MERGE)
    read = clean.ask("GET", "secrets/hidden")
    assert read.json["status"]["version"] == 2
    assert b"tell-nobody" not in made.body + read.body + clean.ask("GET", "secrets").body
    stored = b"".join(path.read_bytes() for path in (server.folder / "state").iterdir() if path.is_file())
    assert b"tell-nobody" not in stored
    clean.box("trusted", secrets=["hidden"])
    seen = clean.run("trusted", "sh", "-c", "echo $TOKEN; cat /run/secrets/hidden/MORE; stat -c %a /run/secrets/hidden/MORE")
    assert clean.output(seen["metadata"]["name"]) == b"tell-nobody\ntell-nobody400\n"


def test_delete_options(clean: Server) -> None:
    made = clean.box("kept")
    other = clean.ask("DELETE", "sandboxes/kept", {"preconditions": {"uid": "another"}})
    assert (other.status, other.json["reason"]) == (409, "Conflict")
    assert clean.ask("DELETE", "sandboxes/kept?dryRun=All").status == 200
    assert clean.ask("GET", "sandboxes/kept").status == 200
    body = {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "propagationPolicy": "Foreground",
        "preconditions": {"uid": made["metadata"]["uid"]},
    }
    assert clean.ask("DELETE", "sandboxes/kept", body).status == 200
    assert clean.ask("GET", "sandboxes/kept").status == 404
    assert clean.ask("DELETE", "sandboxes/kept").status == 404


def test_tables(clean: Server) -> None:
    clean.box("tabled")
    table = clean.ask("GET", "sandboxes", headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}).json
    assert table["kind"] == "Table"
    assert [column["name"] for column in table["columnDefinitions"]][:3] == ["Name", "Phase", "Activity"]
    assert table["rows"][0]["cells"][0] == "tabled"
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"


def test_a_table_is_harmless_on_a_terminal(clean: Server) -> None:
    clean.box("hostile")
    clean.run("hostile", "echo", "\x1b]0;owned\x07", "\u202eevil")
    body = clean.ask("GET", "processes", headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}).body.decode()
    assert "\\u001b" not in body
    assert "\u202e" not in body
    assert "␛]0;owned" in body


def test_offerings_are_the_price_book(server: Server) -> None:
    items = server.ask("GET", "/apis/nodus.dev/v1/offerings").json["items"]
    prices = {item["metadata"]["name"]: item["status"]["priceUSDPerHour"]["from"] for item in items}
    assert prices == {"sandbox": "0.0179", "l40s": "0.793", "rtx-4090": "0.29", "h100-sxm": "2.60"}


def test_a_project_is_another_world(clean: Server) -> None:
    clean.box("mine")
    other = "/apis/nodus.dev/v1/namespaces/elsewhere/sandboxes"
    assert clean.ask("GET", f"{other}/mine").status == 404
    assert clean.ask("POST", other, {"metadata": {"name": "mine", "namespace": "default"}, "spec": {}}).status == 400
    everywhere = clean.ask("GET", "/apis/nodus.dev/v1/sandboxes").json
    assert "mine" in [item["metadata"]["name"] for item in everywhere["items"]]
    assert json.loads(clean.ask("GET", other).body)["items"] == []
