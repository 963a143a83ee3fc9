"""Whatever is sent, the answer names what is wrong; nothing is guessed, nothing breaks."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from server_process import BASE, KEY, Server, serving

LONG = "x" * (1 << 20)


def sandbox(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "nodus.dev/v1", "kind": "Sandbox", "metadata": {"name": "bad"}, "spec": spec}


FIELDS = [
    ({"imag": "x"}, "spec.imag", "FieldValueNotSupported", "did you mean 'image'"),
    ({"resources": {"cpus": "1"}}, "spec.resources.cpus", "FieldValueNotSupported", "did you mean 'cpu'"),
    ({"resources": {"memory": "2GB"}}, "spec.resources.memory", "FieldValueInvalid", 'write "2G"'),
    ({"resources": {"memory": 2}}, "spec.resources.memory", "FieldValueTypeInvalid", "expected a string"),
    ({"resources": {"memory": "1Mi"}}, "spec.resources.memory", "FieldValueInvalid", "at least 16Mi"),
    ({"resources": {"memory": "9999999Ti"}}, "spec.resources.memory", "FieldValueInvalid", "1 EiB"),
    ({"resources": {"memory": "-1"}}, "spec.resources.memory", "FieldValueInvalid", "is not a size"),
    ({"resources": {"cpu": "0"}}, "spec.resources.cpu", "FieldValueInvalid", "cpu"),
    ({"resources": {"cpu": "1e3"}}, "spec.resources.cpu", "FieldValueInvalid", "cpu"),
    ({"resources": {"gpu": {"count": 1}}}, "spec.resources.gpu", "FieldValueNotSupported", "accelerators"),
    ({"lifecycle": {"idleTimeout": "5min"}}, "spec.lifecycle.idleTimeout", "FieldValueInvalid", 'write "5m"'),
    ({"lifecycle": {"idleTimeout": "59s"}}, "spec.lifecycle.idleTimeout", "FieldValueInvalid", "at least 1m (or 0s for never)"),
    ({"lifecycle": {"idleTimeout": "24h1s"}}, "spec.lifecycle.idleTimeout", "FieldValueInvalid", "at most 24h"),
    ({"lifecycle": {"maxLifetime": "721h"}}, "spec.lifecycle.maxLifetime", "FieldValueInvalid", "at most 720h"),
    ({"lifecycle": {"maxLifetime": "0s"}}, "spec.lifecycle.maxLifetime", "FieldValueInvalid", "at least 1m"),
    ({"lifecycle": {"maxLifetime": "99999999999999999999h"}}, "spec.lifecycle.maxLifetime", "FieldValueInvalid", "ten years"),
    ({"lifecycle": {"onIdle": "stop"}}, "spec.lifecycle.onIdle", "FieldValueNotSupported", "did you mean 'Stop'"),
    ({"continuity": {"mode": "Forever"}}, "spec.continuity.mode", "FieldValueNotSupported", "Snapshotted, Ephemeral"),
    ({"state": "Paused"}, "spec.state", "FieldValueNotSupported", "Running, Stopped"),
    ({"maxCostUSD": 5}, "spec.maxCostUSD", "FieldValueTypeInvalid", "expected a string"),
    ({"maxCostUSD": "$5"}, "spec.maxCostUSD", "FieldValueInvalid", 'such as "5"'),
    ({"maxCostUSD": "0.0000001"}, "spec.maxCostUSD", "FieldValueInvalid", "micro-dollar"),
    ({"maxCostUSD": "-1"}, "spec.maxCostUSD", "FieldValueInvalid", "US dollars"),
    ({"maxCostUSD": "0"}, "spec.maxCostUSD", "FieldValueInvalid", "at least"),
    ({"maxCostUSD": "NaN"}, "spec.maxCostUSD", "FieldValueInvalid", "US dollars"),
    ({"env": [{"name": "A=B", "value": "x"}]}, "spec.env[0].name", "FieldValueInvalid", "variable name"),
    ({"env": [{"value": "x"}]}, "spec.env[0].name", "FieldValueRequired", "must be given"),
    ({"env": [{"name": "A"}, {"name": "A"}]}, "spec.env[1].name", "FieldValueDuplicate", "twice"),
    ({"env": [{"name": "A", "value": "\0"}]}, "spec.env[0].value", "FieldValueInvalid", "NUL"),
    ({"env": {"A": "B"}}, "spec.env", "FieldValueTypeInvalid", "expected a list"),
    ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "no", "key": "k"}}}]}, None, "FieldValueNotFound", "no secret 'no'"),
    ({"secrets": ["missing"]}, "spec.secrets[0].name", "FieldValueNotFound", "no secret 'missing'"),
    ({"workingDir": "relative"}, "spec.workingDir", "FieldValueInvalid", "absolute path"),
    ({"workingDir": "/usr/x"}, "spec.workingDir", "FieldValueInvalid", "system folders"),
    ({"workingDir": "/a/../b"}, "spec.workingDir", "FieldValueInvalid", "without '..'"),
    ({"command": ["x", 1]}, "spec.command[1]", "FieldValueTypeInvalid", "expected a word"),
    ({"args": ["x"]}, "spec.args", "FieldValueInvalid", "need a command"),
    (
        {"network": {"egress": {"policy": "AllowList", "allow": ["http://x/"]}}},
        "spec.network.egress.allow[0]",
        "FieldValueInvalid",
        "host name",
    ),
    ({"network": {"egress": {"policy": "AllowList", "allow": ["10.0.0.1"]}}}, "spec.network.egress.allow", "FieldValueInvalid", "address"),
    ({"network": {"egress": {"policy": "AllowList", "presets": ["pypy"]}}}, "spec.network.egress.presets", "FieldValueInvalid", "'pypi'"),
    ({"network": {"egress": {"policy": "AllowList"}}}, "spec.network.egress.policy", "FieldValueInvalid", "allows no host"),
    ({"network": {"egress": {"allow": ["pypi.org"]}}}, "spec.network.egress.policy", "FieldValueInvalid", "deny"),
    ({"network": {"ingress": {"ports": [1]}}}, "spec.network.ingress", "FieldValueNotSupported", "no connections"),
    ({"volumes": []}, "spec.volumes", "FieldValueNotSupported", "/workspace"),
    ({"image": "--option"}, "spec.image", "FieldValueInvalid", "expected an image"),
    ({"image": LONG}, "spec.image", "FieldValueTooLong", "512"),
    ({"workingDir": "/" + LONG}, "spec.workingDir", "FieldValueTooLong", "4096"),
]


@pytest.mark.parametrize(("spec", "field", "reason", "said"), FIELDS, ids=[str(place) for place in range(len(FIELDS))])
def test_every_field_is_refused_with_its_path(server: Server, spec: Any, field: str | None, reason: str, said: str) -> None:
    answer = server.ask("POST", "sandboxes", sandbox(**spec))
    assert (answer.status, answer.json["reason"]) == (422, "Invalid")
    causes = answer.json["details"]["causes"]
    assert any((field is None or cause["field"] == field) and cause["reason"] == reason and said in cause["message"] for cause in causes), (
        causes
    )
    assert len(answer.body) < 4096
    assert answer.body.isascii()


IMAGES = [
    ({}, "spec.base", "FieldValueInvalid", "one of fromSandbox, dockerfile, base"),
    ({"base": "nodus/agent-tools", "fromSandbox": {"name": "a"}}, "spec.base", "FieldValueInvalid", "found fromSandbox and base"),
    ({"fromSandbox": {}}, "spec.fromSandbox.name", "FieldValueRequired", "must be given"),
    ({"fromSandbox": {"name": "../a"}}, "spec.fromSandbox.name", "FieldValueInvalid", "name of a Sandbox"),
    ({"fromSandbox": {"name": "a", "includePaths": ["/x"]}}, "spec.fromSandbox.includePaths", "FieldValueNotSupported", "every file"),
    ({"dockerfile": {}}, "spec.dockerfile.inline", "FieldValueInvalid", "the text, or the blob"),
    ({"dockerfile": {"inline": "RUN true"}}, "spec.dockerfile.inline", "FieldValueInvalid", "no FROM"),
    ({"dockerfile": {"inline": "FROM host\nRUNN x"}}, "spec.dockerfile.inline", "FieldValueInvalid", "nearest instruction is RUN"),
    ({"dockerfile": {"inline": "FROM host", "target": "x"}}, "spec.dockerfile.target", "FieldValueNotSupported", "one stage"),
    ({"dockerfile": {"inline": "FROM host", "context": "sha256:00"}}, "spec.dockerfile.context", "FieldValueInvalid", "sha256:<hex>"),
    ({"dockerfile": {"inline": "FROM host", "buildArgs": {"A B": "x"}}}, None, "FieldValueInvalid", "name of an ARG"),
    ({"base": "x\nRUN y"}, "spec.base", "FieldValueInvalid", "an image such as"),
    ({"base": "nodus/agent-tools", "steps": [{}]}, "spec.steps[0]", "FieldValueInvalid", "one of run, env"),
    ({"base": "nodus/agent-tools", "steps": [{"run": ["x"], "env": {}}]}, "spec.steps[0]", "FieldValueInvalid", "one of run, env"),
    ({"base": "nodus/agent-tools", "steps": [{"run": "x"}]}, "spec.steps[0].run", "FieldValueTypeInvalid", "a list"),
    ({"base": "nodus/agent-tools", "steps": [{"env": {"A": "x\nRUN y"}}]}, None, "FieldValueInvalid", "one line"),
    ({"base": "nodus/agent-tools", "steps": [{"pipInstall": {}}]}, "spec.steps[0].pipInstall", "FieldValueNotSupported", "run step"),
    ({"steps": [], "dockerfile": {"inline": "FROM host"}}, "spec.steps", "FieldValueInvalid", "steps need a base"),
    ({"base": "nodus/agent-tools", "platform": "linux/arm"}, "spec.platform", "FieldValueNotSupported", "linux/arm64"),
    ({"base": "nodus/agent-tools", "tags": ["nodus/x"]}, "spec.tags[0]", "FieldValueInvalid", "outside nodus/"),
    (
        {"base": "nodus/agent-tools", "network": {"egress": {"policy": "AllowList"}}},
        "spec.network.egress.policy",
        "FieldValueInvalid",
        "no host",
    ),
    ({"base": "nodus/agent-tools", "imagePullSecrets": ["x"]}, "spec.imagePullSecrets", "FieldValueNotSupported", "no registry"),
]


@pytest.mark.parametrize(("spec", "field", "reason", "said"), IMAGES, ids=[str(place) for place in range(len(IMAGES))])
def test_every_field_of_an_image_is_refused_with_its_path(server: Server, spec: Any, field: str | None, reason: str, said: str) -> None:
    answer = server.ask("POST", "images", {"metadata": {"name": "bad"}, "spec": spec})
    assert (answer.status, answer.json["reason"]) == (422, "Invalid")
    causes = answer.json["details"]["causes"]
    assert any((field is None or cause["field"] == field) and cause["reason"] == reason and said in cause["message"] for cause in causes), (
        causes
    )
    assert len(answer.body) < 4096
    assert answer.body.isascii()


@pytest.mark.parametrize("project", ["..", "UPPER", "a_b", "%F2%B6%85%B4", "x" * 64])
def test_what_is_no_projects_name_holds_nothing(server: Server, project: str) -> None:
    place = f"/apis/nodus.dev/v1/namespaces/{project}/secrets"
    assert server.ask("POST", place, {"metadata": {"name": "a"}, "spec": {"stringData": {"k": "v"}}}).status == 404
    assert server.ask("GET", place).status == 404


def test_all_that_is_wrong_is_said_at_once(server: Server) -> None:
    body = sandbox(imag="x", state="no", resources={"cpu": "x", "memory": "y"})
    body["metadata"] |= {"labels": {"bad key": "x"}, "colour": "red"}
    body["extra"] = 1
    causes = server.ask("POST", "sandboxes", body).causes
    assert set(causes) >= {"spec.imag", "spec.state", "spec.resources.cpu", "spec.resources.memory", "metadata.colour", "extra"}
    assert len(causes) == 7


@pytest.mark.parametrize(
    "name", ["../etc", "a/b", "-rf", "UPPER", "", ".", "a" * 64, LONG, "naïve", "a\0b", "\ud835", "a b", "\n", "a-", "💥", 7, None, [], {}]
)
def test_names(server: Server, name: Any) -> None:
    body = json.dumps({"metadata": {"name": name}, "spec": {}}).encode()
    answer = server.ask("POST", "sandboxes", body)
    assert (answer.status, answer.json["reason"]) in ((422, "Invalid"), (400, "BadRequest"))
    assert len(answer.body) < 4096


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"nul", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"null", 400),
        (b"\xff\xfe", 400),
        (b'{"spec": NaN}', 400),
        (b'{"metadata": {"name": "x"}, "spec": {}} trailing', 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400),
        (b'{"spec": 7, "metadata": 8}', 422),
        (b'{"spec": {"env": ' + b"[" * 500 + b"]" * 500 + b"}}", 422),
        (b'"' + b"x" * (5 << 20) + b'"', 413),
        (b'{"kind": "Pod"}', 422),
        (b'{"apiVersion": "v2"}', 422),
    ],
    ids=range(16),
)
def test_bodies(server: Server, body: bytes, status: int) -> None:
    answer = server.ask("POST", "sandboxes", body)
    assert (answer.status, answer.json["kind"]) == (status, "Status"), answer.body


def test_truncated_bodies_and_requests(server: Server) -> None:
    for request in (
        b"POST %b/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: 100\r\n\r\n{",
        b"POST %b/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"GET %b/sandboxes HTTP/9.9\r\nAuthorization: Bearer %b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03%b%b",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
            raw.sendall(request % (BASE.encode(), KEY.encode()))
            raw.shutdown(socket.SHUT_WR)
            answer = raw.recv(65536)
        assert b" 500 " not in answer.split(b"\r\n")[0]
    assert server.ask("GET", "sandboxes").status == 200


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/xml", "application/yaml", "multipart/form-data; boundary=x", "json", "\xe9"]
)
def test_media_types(server: Server, media_type: str) -> None:
    answer = server.ask("POST", "sandboxes", sandbox(), {"Content-Type": media_type})
    assert (answer.status, answer.json["reason"]) == (415, "UnsupportedMediaType")


@pytest.mark.parametrize(
    "query",
    [
        "dryRun=Some", "unknown=1", "limit=x", "limit=-1", "limit=99999999999999", "continue=%00", "continue=!!!", "labelSelector=a%20b",
        "labelSelector=" + "a," * 3000, "fieldSelector=x", "fieldSelector=%F0%9F", "labelSelector=a&labelSelector=b", "limit=%C2%B2",
    ],
)  # fmt: skip
def test_queries(server: Server, query: str) -> None:
    answer = server.ask("GET", f"sandboxes?{query}")
    assert (answer.status, answer.json["reason"]) == (400, "BadRequest")


@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic eDp5",
        "Bearer wrong",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        KEY,
        f"Bearer {LONG[:60000]}",
        "Bearer \xe9",
    ],
)
def test_wrong_keys_are_told_nothing(server: Server, key: str | None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", f"{BASE}/sandboxes", headers={} if key is None else {"Authorization": key})
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert (answer.status, body["reason"], body["message"]) == (401, "Unauthorized", "a valid key is needed")


def test_a_key_of_one_project_sees_no_other(tmp_path: Path) -> None:
    from test_server_serve import key_for

    with serving(tmp_path) as server:
        key = {"Authorization": f"Bearer {key_for(server, 'tenant', 'mine')}"}
        server.box("foreign")
        mine = "/apis/nodus.dev/v1/namespaces/mine"
        assert server.ask("GET", f"{mine}/sandboxes", headers=key).status == 200
        assert server.ask("POST", f"{mine}/sandboxes", {"metadata": {"name": "own"}, "spec": {}}, key).status == 201
        for method, path in (
            ("GET", "sandboxes"),
            ("GET", "sandboxes/foreign"),
            ("DELETE", "sandboxes/foreign"),
            ("POST", "sandboxes/foreign/processes"),
        ):
            assert server.ask(method, path, {} if method == "POST" else None, key).json["reason"] == "Forbidden"
        everywhere = server.ask("GET", "/apis/nodus.dev/v1/sandboxes", headers=key).json["items"]
        assert [item["metadata"]["name"] for item in everywhere] == ["own"]
        server.ask("DELETE", "sandboxes/foreign")
        for plural in ("events", "usagerecords"):
            assert server.ask("GET", f"/apis/nodus.dev/v1/{plural}", headers=key).json["items"] == []
            assert server.ask("GET", f"/apis/nodus.dev/v1/{plural}").json["items"] != []


def test_subresources_and_unknown_paths(server: Server) -> None:
    server.box("sub", state="Running")
    cases = [
        ("POST", "sandboxes/sub/processes", {"spec": {"command": []}}, 422),
        ("POST", "sandboxes/sub/processes", {"spec": {"command": ["x\0y"]}}, 422),
        ("POST", "sandboxes/sub/processes", {"spec": {"command": ["x"], "timeout": "0s"}}, 422),
        ("POST", "sandboxes/sub/processes", {"spec": {"command": ["x"], "workingDir": "x"}}, 422),
        ("POST", "sandboxes/sub/processes", {"spec": {"command": "x"}}, 422),
        ("POST", "sandboxes/sub/processes", {"spec": {"command": ["x"], "cmd": 1}}, 422),
        ("POST", "sandboxes/none/processes", {"spec": {"command": ["x"]}}, 404),
        ("POST", "processes/none/stdin", {"seq": 1, "data": ""}, 404),
        ("POST", "processes/none/stdin", {"seq": "1"}, 422),
        ("POST", "processes/none/stdin", {"data": "*"}, 422),
        ("POST", "processes/none/signals", {"signal": "SIGSEGV"}, 422),
        ("POST", "processes/none/signals", {"resize": {"rows": 0, "cols": 1}}, 422),
        ("GET", "processes/none/output?after=-1", None, 400),
        ("GET", "processes/none/output?stream=both", None, 400),
        ("GET", "processes/none?wait=soon", None, 400),
        ("GET", "sandboxes/sub/files", None, 400),
        ("GET", "sandboxes/sub/files?path=%00", None, 400),
        ("GET", "sandboxes/sub/files?path=" + "x" * 5000, None, 400),
        ("PUT", "sandboxes/sub/files?path=x&expectedSHA256=zz", b"", 400),
        ("PUT", "sandboxes/sub/files?path=x", bytes((64 << 20) + 1), 413),
        ("PUT", "sandboxes/sub/files?path=" + "n" * 300, b"", 400),
        ("GET", "pods", None, 404),
        ("GET", "/nothing", None, 404),
        ("PUT", "sandboxes", {}, 405),
        ("POST", "events", {}, 404),
        ("POST", "/apis/nodus.dev/v1/events", {}, 405),
    ]
    for method, path, body, status in cases:
        answer = server.ask(method, path, body)
        assert (answer.status, answer.json["kind"]) == (status, "Status"), (method, path[:80], answer.body[:300])
    server.ask("DELETE", "sandboxes/sub")


def test_bad_idempotency_keys(server: Server) -> None:
    for key in ("", "x" * 256, "tab\there"):
        answer = server.ask("POST", "sandboxes", sandbox(), {"Idempotency-Key": key})
        assert (answer.status, answer.json["reason"]) == (400, "BadRequest")


def test_an_endless_head_is_cut_off_before_any_key_is_checked(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nX: ")
        sent = 0
        try:
            while sent < 64 << 20:
                sent += raw.send(b"x" * 65536)
        except OSError:
            pass
    assert sent < 16 << 20
    assert server.ask("GET", "sandboxes").status == 200


def test_a_slow_client_holds_up_nobody(server: Server) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(50)]
    for one in slow:
        one.sendall(b"POST /apis HTTP/1.1\r\nHost: x\r\nContent-Le")
    began = time.monotonic()
    assert server.ask("GET", "sandboxes").status == 200
    assert time.monotonic() - began < 2
    for one in slow:
        one.close()
