"""Image objects: made from sandboxes and recipes, meant by name, tag and digest, gone with everything that belonged to them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import Answer, Server, serving

TOOLS = "nodus/agent-tools"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an image store of its own, so that what is left can be counted."""
    with serving(tmp_path_factory.mktemp("images")) as server:
        yield server


def make(server: Server, name: str, spec: dict[str, Any], *, project: str = "default") -> dict[str, Any]:
    """An image, made or failed."""
    base = f"/apis/nodus.dev/v1/namespaces/{project}/images"
    answer = server.ask("POST", base, {"metadata": {"name": name}, "spec": spec})
    assert answer.status == 201, answer.body
    assert answer.json["status"] == {"phase": "Pending"}
    made: dict[str, Any] = server.ask("GET", f"{base}/{name}?wait=60s").json
    return made


def said(server: Server, box: str, script: str, **spec: Any) -> str:
    process = server.run(box, "sh", "-c", script, **spec)
    return server.output(process["metadata"]["name"]).decode()


def store(server: Server) -> tuple[set[str], int]:
    """Names and layers in its image store."""
    root = server.folder / "sandboxes" / "images"
    return {path.name for path in (root / "names").glob("served*")}, len(list((root / "records").iterdir()))


def packed(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """A gzipped tar archive."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue())


def put(url: str, data: bytes) -> Answer:
    """A request to a URL as the server gave it, without a key."""
    where, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(where, timeout=30)
    try:
        connection.request("PUT", f"/{path}", data)
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.headers), answer.read())
    finally:
        connection.close()


def upload(server: Server, data: bytes, *, project: str = "default") -> str:
    digest = hashlib.sha256(data).hexdigest()
    asked = {"sha256": digest, "size": len(data), "contentType": "application/gzip"}
    grant = server.ask("POST", f"/blobs/v1/namespaces/{project}/uploads", asked)
    if not grant.json["exists"]:
        assert put(grant.json["url"], data).status == 200
    return f"sha256:{digest}"


def test_a_snapshot_is_watched_from_pending_to_ready(clean: Server) -> None:
    clean.box("a")
    said(clean, "a", "echo w > w; echo h > ~/h")
    version = clean.ask("GET", "images").json["metadata"]["resourceVersion"]
    image = make(clean, "snap", {"fromSandbox": {"name": "a"}})
    assert (image["status"]["phase"], image["status"]["size"] > 0) == ("Ready", True)
    lines = clean.ask("GET", f"images?watch=true&resourceVersion={version}&timeoutSeconds=1").body.splitlines()
    phases = [event["object"]["status"]["phase"] for event in map(json.loads, lines) if event["type"] in ("ADDED", "MODIFIED")]
    assert phases == ["Pending", "Building", "Ready"]
    assert "snap" in clean.ask("GET", "images", headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}).body.decode()
    clean.box("b", image="snap")
    assert said(clean, "b", "cat w ~/h") == "w\nh\n"
    assert clean.ask("GET", "sandboxes/b").json["status"]["image"]["digest"] == image["status"]["digest"]


def test_a_snapshot_of_a_stopped_sandbox_is_what_it_would_start_with(clean: Server) -> None:
    clean.box("a")
    said(clean, "a", "echo w > w; echo h > ~/h")
    clean.ask("PATCH", "sandboxes/a", {"spec": {"state": "Stopped"}}, {"Content-Type": "application/merge-patch+json"})
    clean.until("sandboxes/a", phase="Stopped")
    assert make(clean, "snap", {"fromSandbox": {"name": "a"}})["status"]["phase"] == "Ready"
    assert clean.ask("GET", "sandboxes/a").json["status"]["phase"] == "Stopped"
    clean.box("b", image="snap")
    assert said(clean, "b", "cat w; ls ~/h 2>&1") == "w\nls: cannot access '/home/user/h': No such file or directory\n"


@pytest.mark.parametrize("frozen", [False, True])
def test_no_image_holds_a_secret(clean: Server, frozen: bool) -> None:
    clean.ask("POST", "secrets", {"metadata": {"name": "tok"}, "spec": {"stringData": {"KEY": "s3cret-value"}}})
    clean.box("a", secrets=["tok"])
    watcher = clean.ask("POST", "sandboxes/a/processes", {"spec": {"command": ["sleep", "60"]}}).json["metadata"]["name"]
    if frozen:
        assert clean.ask("POST", "sandboxes/a/freeze", {}).status == 200
    assert make(clean, "snap", {"fromSandbox": {"name": "a"}})["status"]["phase"] == "Ready"
    assert clean.ask("GET", "sandboxes/a").json["status"].get("frozen", False) is frozen
    clean.ask("POST", "sandboxes/a/thaw", {})
    assert said(clean, "a", "cat /run/secrets/tok/KEY; echo; echo $KEY") == "s3cret-value\ns3cret-value\n"
    assert clean.ask("GET", f"processes/{watcher}").json["status"]["phase"] == "Running"
    clean.box("b", image="snap")
    assert said(clean, "b", "find /run/secrets -type f; env | grep -c s3cret", user="root") == "0\n"
    layers = clean.folder / "sandboxes" / "images" / "layers"
    assert not [path for path in layers.rglob("*") if path.is_file() and b"s3cret-value" in path.read_bytes()]


def test_an_unknown_image_names_the_nearest(clean: Server) -> None:
    clean.box("a")
    make(clean, "prepared", {"fromSandbox": {"name": "a"}, "tags": ["team/tools:1"]})
    for wrong, near in (("prepard", "prepared"), ("team/tools:2", "team/tools:1"), ("nodus/agent-tool", TOOLS), ("oci:/etc", None)):
        answer = clean.ask("POST", "sandboxes", {"metadata": {"name": "b"}, "spec": {"image": wrong}})
        assert (answer.status, answer.json["reason"], list(answer.causes)) == (422, "ImageNotFound", ["spec.image"])
        assert near is None or f"did you mean {near!r}" in answer.json["message"]
    missing = clean.ask("POST", "images", {"metadata": {"name": "x"}, "spec": {"fromSandbox": {"name": "aa"}}})
    assert (missing.status, "did you mean 'a'" in missing.json["message"]) == (422, True)


def test_a_tag_moves_and_sandboxes_do_not(clean: Server) -> None:
    clean.box("a")
    for number in ("1", "2"):
        said(clean, "a", f"echo {number} > ~/h")
        make(clean, f"image{number}", {"fromSandbox": {"name": "a"}, "tags": ["tools"]})
        clean.box(f"b{number}", image="tools", continuity={"mode": "Ephemeral"})
    clean.ask("PATCH", "sandboxes/b1", {"spec": {"state": "Stopped"}}, {"Content-Type": "application/merge-patch+json"})
    clean.until("sandboxes/b1", phase="Stopped")
    assert [said(clean, name, "cat ~/h") for name in ("b1", "b2")] == ["1\n", "2\n"]


def test_another_projects_images_are_not_there(clean: Server) -> None:
    clean.box("a")
    digest = make(clean, "mine", {"fromSandbox": {"name": "a"}, "tags": ["tag"]})["status"]["digest"]
    elsewhere = "/apis/nodus.dev/v1/namespaces/other"
    for word in ("mine", "tag", digest, digest[7:27]):
        answer = clean.ask("POST", f"{elsewhere}/sandboxes", {"metadata": {"name": "b"}, "spec": {"image": word}})
        assert (answer.status, answer.json["reason"]) == (422, "ImageNotFound")
        assert "did you mean" not in answer.json["message"]
        refused = clean.ask("POST", f"{elsewhere}/images", {"metadata": {"name": "i"}, "spec": {"base": word}})
        assert (refused.status, list(refused.causes)) == (422, ["spec.base"])
        failed = make(clean, f"from-{word[:4].strip(':')}-{len(word)}", {"dockerfile": {"inline": f"FROM {word}"}}, project="other")
        assert (failed["status"]["phase"], "there is no image" in failed["status"]["message"]) == ("Failed", True)
    assert clean.ask("GET", f"{elsewhere}/images/mine").status == 404
    assert clean.ask("POST", f"{elsewhere}/images", {"metadata": {"name": "i"}, "spec": {"fromSandbox": {"name": "a"}}}).status == 422
    clean.ask("DELETE", f"{elsewhere}/images")


def test_what_another_project_built_is_built_again(clean: Server) -> None:
    """The same words may have come to something that only that project may know."""
    spec = {"dockerfile": {"inline": f"FROM {TOOLS}\nRUN head -c 16 /dev/urandom > ~/drawn"}}
    digests = [
        make(clean, name, spec, project=project)["status"]["digest"]
        for name, project in (("a", "default"), ("b", "default"), ("a", "other"))
    ]
    assert digests[0] == digests[1] != digests[2]
    clean.ask("DELETE", "/apis/nodus.dev/v1/namespaces/other/images")


def test_a_from_reads_nothing_of_the_machine(clean: Server, tmp_path: Path) -> None:
    for place in (f"oci:{tmp_path}", f"docker-archive:{tmp_path}/x.tar"):
        failed = make(clean, f"f{len(place)}", {"dockerfile": {"inline": f"FROM {place}"}})
        assert "Dockerfile:1: FROM: there is no image" in failed["status"]["message"]


def test_a_deleted_images_layers_go_and_its_sandboxes_live_on(own: Server) -> None:
    own.box("a")
    said(own, "a", "echo original > ~/h")
    make(own, "snap", {"fromSandbox": {"name": "a"}})
    own.ask("DELETE", "sandboxes/a")
    own.box("b", image="snap")
    assert said(own, "b", "cat ~/h; echo mine > w") == "original\n"
    assert own.ask("DELETE", "images/snap").status == 200
    assert own.ask("GET", "images/snap").status == 404
    assert said(own, "b", "cat ~/h") == "original\n"
    own.ask("PATCH", "sandboxes/b", {"spec": {"state": "Stopped"}}, {"Content-Type": "application/merge-patch+json"})
    own.until("sandboxes/b", phase="Stopped")
    assert said(own, "b", "cat ~/h w") == "original\nmine\n"
    assert store(own)[1] == 1
    again = own.ask(
        "POST", "sandboxes", {"metadata": {"name": "b"}, "spec": {"image": "snap", "resources": {"memory": "256Mi", "disk": "32Mi"}}}
    )
    assert (again.status, again.json["metadata"]["name"]) == (200, "b")
    own.ask("DELETE", "sandboxes/b")
    assert store(own) == (set(), 0)


def test_images_outlive_a_server_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.box("a")
        said(server, "a", "echo original > ~/h")
        make(server, "kept", {"fromSandbox": {"name": "a"}})
        slow = {"dockerfile": {"inline": f"FROM {TOOLS}\nRUN sleep 60"}}
        assert server.ask("POST", "images", {"metadata": {"name": "slow"}, "spec": slow}).status == 201
        server.until("images/slow", phase="Building")
        server.kill()
        server.start()
        assert server.ask("GET", "images/slow").json["status"]["reason"] == "Interrupted"
        assert not list((tmp_path / "state" / "contexts").glob("*"))
        server.box("b", image="kept")
        assert said(server, "b", "cat ~/h") == "original\n"
        assert len(store(server)[0]) == 1


def test_a_kill_amid_a_snapshot_and_a_fork_leaves_nothing_half_made(tmp_path: Path) -> None:
    def ask(path: str, body: object) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.ask("POST", path, body)

    with serving(tmp_path) as server:
        for number, delay_s in enumerate((0.02, 0.15)):
            server.box("a", resources={"memory": "256Mi", "disk": "128Mi"})
            said(server, "a", "for i in $(seq 300); do head -c 20000 /dev/urandom > $i; done")
            requests = (
                ("images", {"metadata": {"name": f"i{number}"}, "spec": {"fromSandbox": {"name": "a"}}}),
                ("sandboxes/a/fork", {"count": 4}),
            )
            threads = [threading.Thread(target=ask, args=request) for request in requests]
            for thread in threads:
                thread.start()
            time.sleep(delay_s)
            server.kill()
            for thread in threads:
                thread.join(60)
            server.start()
            boxes = server.ask("GET", "sandboxes").json["items"]
            assert (len(boxes), {box["status"]["phase"] for box in boxes}) in ((1, {"Failed"}), (5, {"Failed"}))
            found = server.ask("GET", f"images/i{number}")
            assert found.status == 404 or found.json["status"]["phase"] in ("Failed", "Ready")
            server.ask("DELETE", "sandboxes")
            server.ask("DELETE", "images")
            assert store(server) == (set(), 0)
            assert list((tmp_path / "sandboxes" / "images" / "layers").iterdir()) == []


def test_a_dockerfile_with_a_context(clean: Server) -> None:
    context = upload(clean, packed({"app/main.py": b"print('from the context')\n", "app/run.sh": b"#!/bin/sh\npython3 main.py\n"}, 0o755))
    text = f"FROM {TOOLS}\nARG WHO=nobody\nUSER root\nWORKDIR /srv/app\nCOPY app/ .\nRUN echo $WHO > who\nUSER user\nENV COLOUR=blue"
    spec = {"dockerfile": {"inline": text, "context": context, "buildArgs": {"WHO": "me"}}, "tags": ["app"]}
    image = make(clean, "app", spec)
    assert (image["status"]["phase"], image["status"]["tags"]) == ("Ready", {"app": image["status"]["digest"]})
    assert "[6/8] RUN echo $WHO > who" in clean.ask("GET", "images/app/log").body.decode()
    assert clean.box("b", image="app")["spec"]["workingDir"] == "/srv/app"
    assert said(clean, "b", "pwd; ./run.sh; cat who; echo $COLOUR; id -un") == "/srv/app\nfrom the context\nme\nblue\nuser\n"
    in_a_blob = make(clean, "blob", {"dockerfile": {"blob": upload(clean, text.encode()), "context": context, "buildArgs": {"WHO": "me"}}})
    assert in_a_blob["status"]["digest"] == image["status"]["digest"]


def test_a_base_with_steps(clean: Server) -> None:
    steps = [
        {"run": ["echo 'a \"b\" $HOME' > /opt/said", "mkdir /srv/x"]},
        {"env": {"TEXT": 'x "$Y" \\ #z'}},
        {"copy": {"blob": upload(clean, packed({"one.txt": b"1"})), "dest": "/srv/x/one.txt"}},
        {"copy": {"blob": upload(clean, packed({"one.txt": b"1", "sub/two.txt": b"2"})), "dest": "/srv/tree"}},
        {"copy": {"blob": upload(clean, b"no archive"), "dest": "/srv/plain"}},
        {"workdir": "/srv/x"},
    ]
    image = make(clean, "steps", {"base": TOOLS, "steps": steps})
    assert image["status"]["phase"] == "Ready", image["status"]
    more = make(clean, "more", {"base": "steps", "steps": [{"run": ["echo more > more"]}]})
    assert more["status"]["phase"] == "Ready", more["status"]
    clean.box("b", image="more")
    script = (
        'cat /opt/said; echo "$TEXT"; cat /srv/x/one.txt /srv/tree/one.txt /srv/tree/sub/two.txt /srv/plain; echo; pwd; cat more; id -un'
    )
    assert said(clean, "b", script) == 'a "b" $HOME\nx "$Y" \\ #z\n112no archive\n/srv/x\nmore\nuser\n'


def test_a_dockerfile_that_is_no_text(clean: Server) -> None:
    for data, message in ((b"x" * (1 << 21), "bytes at most"), (b"\xff\xfe", "is not supported")):
        failed = make(clean, f"i{len(data)}", {"dockerfile": {"blob": upload(clean, data)}})["status"]
        assert (failed["phase"], message in failed["message"]) == ("Failed", True), failed


def test_a_build_that_fails_says_where_and_can_be_asked_for_again(clean: Server) -> None:
    spec = {"dockerfile": {"inline": f"FROM {TOOLS}\nRUN echo the last words >&2; exit 9"}}
    failed = make(clean, "bad", spec)["status"]
    assert (failed["phase"], failed["reason"]) == ("Failed", "BuildFailed")
    assert "Dockerfile:2: RUN: it ended with exit code 9: the last words" in failed["message"]
    assert "the last words" in clean.ask("GET", "images/bad/log?follow=true").body.decode()
    refused = clean.ask("POST", "sandboxes", {"metadata": {"name": "b"}, "spec": {"image": "bad"}})
    assert (refused.status, "exit code 9" in refused.json["message"]) == (422, True)
    assert clean.ask("POST", "images", {"metadata": {"name": "bad"}, "spec": spec}).json["status"]["phase"] == "Pending"
    assert clean.ask("GET", "images/bad?wait=30s").json["status"]["phase"] == "Failed"


def test_a_sandbox_waits_for_its_image_and_can_be_deleted_meanwhile(clean: Server) -> None:
    spec = {"dockerfile": {"inline": f"FROM {TOOLS}\nRUN sleep 1.5; echo done > ~/h"}}
    clean.ask("POST", "images", {"metadata": {"name": "slow"}, "spec": spec})
    clean.box("b", image="slow")
    clean.box("c", image="slow")
    assert clean.ask("GET", "sandboxes/b").json["status"]["phase"] in ("Pending", "Starting")
    assert clean.ask("DELETE", "sandboxes/c").status == 200
    assert said(clean, "b", "cat ~/h") == "done\n"


def test_a_build_has_no_network_unless_it_asks_and_no_secret(clean: Server) -> None:
    look = "import socket; print(socket.getaddrinfo('a.example.org', 80)[0][4][0])"
    closed = {"base": TOOLS, "steps": [{"run": [f'python3 -c "{look}" > /opt/out 2>&1 || echo none > /opt/out']}]}
    allowed = closed | {"network": {"egress": {"policy": "AllowList", "allow": ["*.example.org"]}}}
    for name, spec, expected in (("closed", closed, "none\n"), ("allowed", allowed, "198.18.0.1\n")):
        assert make(clean, name, spec)["status"]["phase"] == "Ready"
        clean.box(f"b{name}", image=name)
        assert said(clean, f"b{name}", "cat /opt/out") == expected


def test_deleting_an_image_that_is_being_made_ends_the_build(own: Server) -> None:
    spec = {"dockerfile": {"inline": f"FROM {TOOLS}\nRUN sleep 60"}}
    own.ask("POST", "images", {"metadata": {"name": "slow"}, "spec": spec})
    own.until("images/slow", phase="Building")
    assert own.ask("DELETE", "images/slow", timeout=20).status == 200
    assert own.ask("GET", "images/slow").status == 404
    assert not list((own.folder / "state" / "contexts").glob("*"))


def test_images_under_nodus_are_everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns the machine names one so in its store; nothing else of the store is there."""
    import sandmill
    from sandmill.sandboxes.images.store import Store

    monkeypatch.delenv("SANDMILL_API_URL", raising=False)
    monkeypatch.setenv("SANDMILL_STATE", str(tmp_path / "sandboxes"))
    with sandmill.Sandbox.create(memory="256Mi", disk="32Mi") as box:
        box.write("/home/user/h", "public\n")
        public = box.snapshot_filesystem("nodus/prepared:1")
        box.write("/home/user/h", "private\n")
        private = box.snapshot_filesystem("private")
    with serving(tmp_path) as server:
        server.box("b", image="nodus/prepared:1")
        assert said(server, "b", "cat ~/h") == "public\n"
        server.box("d", image=public.digest)
        assert said(server, "d", "cat ~/h") == "public\n"
        server.ask("DELETE", "sandboxes/d")
        for word in ("private", "nodus/prepared:2", private.digest):
            assert server.ask("POST", "sandboxes", {"metadata": {"name": "c"}, "spec": {"image": word}}).status == 422
        Store(tmp_path / "sandboxes" / "images").unname("nodus/prepared:1")
        server.ask("PATCH", "sandboxes/b", {"spec": {"state": "Stopped"}}, {"Content-Type": "application/merge-patch+json"})
        server.until("sandboxes/b", phase="Stopped")
        assert said(server, "b", "cat ~/h") == "public\n"
        server.ask("DELETE", "sandboxes/b")
        assert store(server)[0] == set()


def test_uploads_are_announced_and_are_what_was_announced(clean: Server) -> None:
    data, digest = b"some bytes", hashlib.sha256(b"some bytes").hexdigest()
    uploads = "/blobs/v1/namespaces/default/uploads"
    grant = clean.ask("POST", uploads, {"sha256": digest, "size": len(data)}).json
    assert (put(grant["url"], b"other byte").status, put(grant["url"], b"short").status, put(grant["url"], data * 2).status) == (
        412,
        400,
        400,
    )
    assert put(grant["url"].replace("grant=", "grant=x"), data).status == 403
    assert put(grant["url"].replace(digest, "0" * 64), data).status == 403
    assert clean.ask("GET", f"/blobs/v1/namespaces/default/blobs/{digest}").status == 404
    assert put(grant["url"], data).status == 200
    assert clean.ask("POST", uploads, {"sha256": digest, "size": len(data)}).json == {"exists": True}
    got = clean.ask("GET", f"/blobs/v1/namespaces/default/blobs/{digest}")
    assert (got.status, got.body, got.headers["x-nodus-sha256"]) == (200, data, digest)
    assert clean.ask("GET", f"/blobs/v1/namespaces/other/blobs/{digest}").status == 404
    for path in (f"/blobs/v1/namespaces/../blobs/{digest}", "/blobs/v1/namespaces/default/blobs/..%2f..%2fsecret.key"):
        assert clean.ask("GET", path).status == 404
    wrong = clean.ask("POST", uploads, {"sha256": "x", "size": 1 << 40})
    assert (wrong.status, set(wrong.causes)) == (422, {"sha256", "size"})
    spec = {"dockerfile": {"blob": f"sha256:{'0' * 64}"}}
    assert clean.ask("POST", "images", {"metadata": {"name": "x"}, "spec": spec}).causes == {"spec.dockerfile.blob": "FieldValueNotFound"}


def test_a_full_image_store_is_said_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_IMAGES_BYTES", "2Mi")
    with serving(tmp_path) as server:
        server.box("a")
        said(server, "a", "head -c 1000000 /dev/zero | tr '\\0' x > one")
        assert make(server, "first", {"fromSandbox": {"name": "a"}})["status"]["phase"] == "Ready"
        said(server, "a", "head -c 3000000 /dev/zero | tr '\\0' y > two")
        full = make(server, "second", {"fromSandbox": {"name": "a"}})["status"]
        assert (full["phase"], "leaves no room" in full["message"]) == ("Failed", True)
        server.box("b", image="first")
        assert said(server, "b", "wc -c < one") == "1000000\n"


def test_many_at_once_from_one_image(clean: Server) -> None:
    clean.box("a")
    said(clean, "a", "echo shared > ~/h")
    clean.ask("POST", "images", {"metadata": {"name": "snap"}, "spec": {"fromSandbox": {"name": "a"}}})
    threads = [threading.Thread(target=clean.box, args=(f"b{number}",), kwargs={"image": "snap"}) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [said(clean, f"b{number}", "cat ~/h") for number in range(8)] == ["shared\n"] * 8
