"""Images and nodes: an image of the head starts anywhere, and the files of a sandbox on a node become one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sandboxes" / "images"))
from image_archives import Member, docker_save, layer, programs
from node_process import NODES, SANDMILL, Head, NodeProcess, eventually, heading
from relay import relaying
from server_process import Server
from test_server_commands import MERGE
from test_server_images import TOOLS, make, said

from sandmill.sandboxes.images import Image
from sandmill.sandboxes.images.image import architecture
from sandmill.sandboxes.images.store import Store


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head without sandboxes of its own."""
    with heading(tmp_path_factory.mktemp("head"), "--no-local", "--room-wait", "2s") as head:
        yield head


@pytest.fixture
def head(shared: Head) -> Iterator[Head]:
    """The shared one; afterwards it has no sandboxes, no images and no nodes."""
    yield shared
    alone(shared)
    assert shared.ask("DELETE", "images").status == 200


def alone(head: Head) -> None:
    """Ends its sandboxes and nodes."""
    assert head.ask("DELETE", "sandboxes").status == 200
    for node in head.nodes:
        if node.process.poll() is None:
            assert node.stop() == 0


def built(head: Server, name: str, script: str) -> dict[str, Any]:
    """An image that the head has built."""
    made = make(head, name, {"base": TOOLS, "steps": [{"run": [script]}]})
    assert made["status"]["phase"] == "Ready", made["status"]
    return made


def layers(folder: Path) -> set[str]:
    """Layers of an image store, and whatever else lies beside them."""
    return {path.name for path in (folder / "sandboxes" / "images" / "layers").iterdir()}


def left_over(node: NodeProcess) -> list[str]:
    """What is half-fetched on a node."""
    arriving = node.folder / "state" / "arriving"
    drafts = [name for name in layers(node.folder) if name.startswith(".")]
    return drafts + (os.listdir(arriving) if arriving.exists() else [])


def test_an_image_of_a_sandbox_on_a_node_starts_on_the_head_and_on_another_node(tmp_path: Path) -> None:
    with heading(tmp_path, "--max-local", "1") as head:
        head.up("filler")
        first = head.join("a")
        head.ask("POST", "secrets", {"metadata": {"name": "token"}, "spec": {"stringData": {"K": "v123"}}})
        head.up("origin", secrets=["token"])
        assert head.place("origin") == "a"
        said(head, "origin", "echo w > w; ln w x; mkdir ~/d; chmod 700 ~/d; truncate -s 20M hole; mkfifo p")
        said(head, "origin", "rm /etc/issue", user="root")
        image = make(head, "snap", {"fromSandbox": {"name": "origin"}})["status"]
        assert image["phase"] == "Ready", image
        assert said(head, "origin", "cat /run/secrets/token/K") == "v123"
        assert head.ask("DELETE", "sandboxes/filler").status == 200
        assert first.stop() == 0
        head.up("here", image="snap")
        head.join("b")
        head.up("there", image="snap")
        assert (head.place("here"), head.place("there")) == (None, "b")
        script = "cat w; stat -c '%h %a %U' w ~/d; stat -c %s hole; test -p p && echo pipe; ls -d /etc/issue /run/secrets/*/* 2>&-"
        for name in ("here", "there"):
            assert said(head, name, script) == "w\n2 644 user\n2 700 user\n20971520\npipe\n", name
        assert head.ask("GET", "sandboxes/there").json["status"]["image"]["digest"] == image["digest"]
        nothing_half_done(head)


def test_a_foreign_image_that_the_head_has_imported_starts_on_a_node(head: Head, tmp_path: Path) -> None:
    base = layer(*programs("sh", "cat", "stat", "ls"), Member("etc/old", b"old"), Member("data/one", b"1", uid=7, gid=8, mode=0o4750))
    upper = layer(Member("etc/.wh.old"), Member("data/.wh..wh..opq"), Member("data/three", b"3"))
    archive = docker_save(tmp_path / "image.tar", [base, upper], tags=["t:1"], config={"Env": ["FROM_IMAGE=yes"], "WorkingDir": "/data"})
    environment = {**os.environ, "SANDMILL_STATE": str(head.folder / "sandboxes")}
    command = [*SANDMILL, "image", "import", f"docker-archive:{archive}", "--name", "nodus/foreign:1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=environment)
    node = head.join("foreign")
    head.up("box", image="nodus/foreign:1")
    assert head.place("box") == "foreign"
    assert said(head, "box", "ls /data; ls /etc/old 2>/dev/null; echo $FROM_IMAGE; cat three") == "three\nyes\n3"
    assert layers(node.folder) == layers(head.folder)
    subprocess.run([*SANDMILL, "image", "rm", "nodus/foreign:1"], capture_output=True, timeout=60, env=environment)


def test_a_layer_is_fetched_once_for_all_who_start_from_it(head: Head) -> None:
    built(head, "base", "head -c 12000000 /dev/urandom > /opt/base")
    make(head, "other", {"base": "base", "steps": [{"run": ["echo more > /opt/more"]}]})
    with relaying(head.port) as relay:
        head.join("once", through=relay.url)
        for number in range(6):
            head.box(f"b{number}", image="other" if number % 2 else "base")
        for number in range(6):
            head.until(f"sandboxes/b{number}", phase="Running")
        assert said(head, "b0", "stat -c %s /opt/base") == said(head, "b5", "stat -c %s /opt/base") == "12000000\n"
        assert 12_000_000 < relay.brought < 14_000_000


def test_a_node_makes_room_by_its_own_bound_and_spares_what_is_used(head: Head) -> None:
    for name in ("one", "two", "three"):
        built(head, name, f"head -c 12000000 /dev/urandom > /opt/{name}")
    node = head.join("small", SANDMILL_IMAGES_BYTES="30M")
    head.up("a", image="one")
    head.up("b", image="two")
    head.box("c", image="three")
    stopped = head.until("sandboxes/c", phase="Stopped")["status"]
    assert stopped["stopReason"] == "CapacityUnavailable"
    assert "leaves no room" in stopped["message"]
    assert head.ask("DELETE", "sandboxes/a").status == 200
    eventually(lambda: head.run("c", "true")["status"].get("exitCode") == 0)
    assert head.place("c") == "small"
    assert len(layers(node.folder)) == 2
    assert left_over(node) == []


def test_a_node_is_given_only_what_was_placed_on_it(head: Head) -> None:
    wanted, secret = (built(head, name, f"echo {name} > /opt/f")["status"] for name in ("wanted", "secret"))
    head.join("given")
    head.join("other")
    head.ask("PATCH", f"{NODES}/other", {"spec": {"state": "Draining"}}, MERGE)
    head.up("box", image="wanted")

    def asked(path: str, key: str = head.node_key, node: str = "given") -> int:
        return head.ask("GET", f"{NODES}/{node}/stored/{path}", headers={"Authorization": f"Bearer {key}"}).status

    (own,), (foreign,) = wanted["config"]["layers"], secret["config"]["layers"]
    assert asked(f"images/{wanted['digest']}") == asked(f"layers/{own}") == asked(f"layers/{own}/pieces?offset=0") == 200
    assert asked(f"images/{secret['digest']}") == asked(f"layers/{foreign}") == asked(f"layers/{foreign}/pieces") == 403
    assert asked(f"layers/{own}", key=head.key) == 403
    assert asked(f"layers/{own}", node="other") == asked(f"layers/{own}", node="none") == 403
    assert asked("layers/sha256:..%2f..%2fnames") == 404
    assert head.ask("GET", f"stored/layers/{own}").status == 403
    assert head.ask("PUT", f"supplies/{wanted['digest']}").status == 403


def test_an_image_of_another_architecture_goes_to_no_node_of_this_one(head: Head) -> None:
    other = "arm64" if architecture() == "amd64" else "amd64"
    store = Store(head.folder / "sandboxes" / "images")
    store.save(Image(architecture=other), "nodus/other:1")
    try:
        head.join("own")
        head.box("box", image="nodus/other:1")
        stopped = head.until("sandboxes/box", phase="Stopped")["status"]
        assert stopped["stopReason"] == "CapacityUnavailable"
        assert f"own is {architecture()}, not {other}" in stopped["message"]
    finally:
        store.unname("nodus/other:1")


def test_what_nobody_needs_stays_on_a_node_only_while_there_is_room(head: Head) -> None:
    built(head, "old", "head -c 12000000 /dev/urandom > /opt/old")
    node = head.join("little", SANDMILL_IMAGES_BYTES="20M")
    head.up("box", image="old")
    assert head.ask("DELETE", "sandboxes/box").status == 200
    with_old = layers(node.folder)
    node.kill()
    node.start()
    assert layers(node.folder) == with_old
    built(head, "new", "head -c 12000000 /dev/urandom > /opt/new")
    head.up("next", image="new")
    assert layers(node.folder).isdisjoint(with_old)


def test_a_group_that_does_not_fit_goes_elsewhere_with_the_files_of_that_moment(head: Head) -> None:
    head.ask("POST", "secrets", {"metadata": {"name": "token"}, "spec": {"stringData": {"K": "v123"}}})
    node = head.join("group", "--max-sandboxes", "3")
    head.up("origin", secrets=["token"], env=[{"name": "E", "value": "e1"}])
    said(head, "origin", "echo prepared > f; (while sleep 0.01; do date +%s%N > next; mv next moving; done) >/dev/null 2>&1 &")
    full = head.ask("POST", "sandboxes/origin/fork", {"count": 4})
    assert (full.status, full.json["reason"]) == (503, "CapacityUnavailable"), full.body
    assert len(head.ask("GET", "sandboxes").json["items"]) == 1
    assert node.object["status"]["sandboxes"] == 1
    rest = head.join("rest")
    rest.process.send_signal(signal.SIGSTOP)  # for some beats: what nobody had a claim to would be ended meanwhile
    threading.Timer(4, rest.process.send_signal, (signal.SIGCONT,)).start()
    forked = head.ask("POST", "sandboxes/origin/fork", {"count": 4})
    assert forked.status == 201, forked.body
    names = [item["metadata"]["name"] for item in forked.json["items"]]
    assert sorted(str(head.place(name)) for name in names) == ["group", "group", "rest", "rest"]
    seen = {said(head, name, "cat f moving; echo $E; cat /run/secrets/token/K; stat -c %a%U /run/secrets/token/K") for name in names}
    assert len(seen) == 1, seen
    assert seen.pop().startswith("prepared\n")
    assert said(head, "origin", "cat /run/secrets/token/K; test $(cat moving) != $(sleep 1; cat moving) && echo on") == "v123on\n"
    head.ask("PATCH", f"sandboxes/{names[-1]}", {"spec": {"state": "Stopped"}}, MERGE)
    head.until(f"sandboxes/{names[-1]}", phase="Stopped")
    assert said(head, names[-1], "cat f") == "prepared\n"
    nothing_half_done(head)
    assert not [name for name in os.listdir(head.folder / "sandboxes" / "images" / "names") if "passing" in name]


def nothing_half_done(head: Head) -> None:
    """No fetch, and no name for one, is left anywhere; no node keeps an image for its head."""
    for node in head.nodes:
        if node.process.poll() is None:
            eventually(lambda node=node: left_over(node) == [])
    eventually(lambda: not [name for name in layers(head.folder) if name.startswith(".")])
