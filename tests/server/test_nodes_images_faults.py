"""Images on their way when something breaks: a clear failure of the infrastructure, nothing half-written, nothing left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import Head, NodeProcess, eventually, heading
from relay import Relay, relaying
from test_nodes_images import alone, built, layers, left_over
from test_server_images import make, said

LARGE = "head -c 12000000 /dev/urandom > /opt/large"
HALF = 5_000_000


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head without sandboxes of its own, and an image."""
    with heading(tmp_path_factory.mktemp("head"), "--no-local", "--room-wait", "2s", "--node-lease", "5s") as head:
        built(head, "large", LARGE)
        yield head


@pytest.fixture
def relay(head: Head) -> Iterator[Relay]:
    """The wire from nodes to it. Afterwards it has no sandboxes and no nodes."""
    with relaying(head.port) as relay:
        yield relay
        alone(head)


def half_way(head: Head, relay: Relay, name: str) -> NodeProcess:
    """A node that has half of the image, and waits for the rest."""
    node = head.join(name, through=relay.url)
    relay.stall_after = HALF
    head.box("box", image="large")
    assert relay.stalled.wait(30)
    return node


def came_whole(head: Head) -> bool:
    return said(head, "box", "stat -c %s /opt/large") == "12000000\n"


def test_a_node_killed_in_the_middle_of_a_fetch(head: Head, relay: Relay) -> None:
    node = half_way(head, relay, "killed")
    assert left_over(node) != []
    node.kill()
    stopped = head.until("sandboxes/box", phase="Stopped")["status"]
    assert stopped["stopReason"] == "CapacityUnavailable"
    assert "node killed" in stopped["message"], stopped
    relay.stall_after = None
    node.start()
    assert left_over(node) == []
    assert layers(node.folder) == set()
    assert came_whole(head)
    assert len(layers(node.folder)) == 1


def test_another_node_takes_over_when_one_is_killed_in_the_middle(head: Head, relay: Relay) -> None:
    node = half_way(head, relay, "first")
    head.join("second")
    node.kill()
    head.until("sandboxes/box", phase="Running")
    assert head.place("box") == "second"
    assert came_whole(head)


def test_damaged_bytes_are_fetched_again_and_never_become_a_layer(head: Head, relay: Relay) -> None:
    relay.damage = 1_000_000
    node = head.join("damaged", through=relay.url)
    head.box("box", image="large")
    stopped = head.until("sandboxes/box", phase="Stopped")["status"]
    assert stopped["stopReason"] == "CapacityUnavailable"
    assert "came damaged" in stopped["message"]
    assert "should be sha256:" in stopped["message"]
    assert layers(node.folder) == set()
    assert left_over(node) == []
    assert node.errors.count("came damaged") == 2
    relay.damage = 1
    assert came_whole(head)
    assert node.errors.count("came damaged") == 3


def test_after_a_broken_connection_it_goes_on_at_the_same_piece(head: Head, relay: Relay) -> None:
    node = half_way(head, relay, "cut")
    relay.stall_after = None
    relay.cut()
    head.until("sandboxes/box", phase="Running")
    assert 12_000_000 < relay.brought < 12_000_000 + (8 << 20)
    assert left_over(node) == []


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """A disk of its own for a folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    place.mkdir(parents=True)
    assert libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode()) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.umount2(os.fsencode(place), 2) == 0


def test_a_full_disk_on_a_node(head: Head, relay: Relay) -> None:
    with small_disk(head.folder / "node-full" / "sandboxes", "10M"):
        node = head.join("full")
        head.box("box", image="large")
        stopped = head.until("sandboxes/box", phase="Stopped")["status"]
        assert stopped["stopReason"] == "CapacityUnavailable"
        assert "No space left on device" in stopped["message"]
        assert left_over(node) == []
        assert layers(node.folder) == set()
        head.up("other")
        assert head.run("other", "true")["status"]["exitCode"] == 0
        head.join("empty")
        assert came_whole(head)
        assert head.place("box") == "empty"
        alone(head)


def test_a_head_killed_in_the_middle_of_a_fetch(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local", "--node-lease", "20s") as head, relaying(head.port) as relay:
        built(head, "large", LARGE)
        node = half_way(head, relay, "a")
        head.kill()
        relay.stall_after = None
        head.start()
        node.until(phase="Ready")
        assert came_whole(head)
        eventually(lambda: left_over(node) == [])
        eventually(lambda: node.object["status"]["sandboxes"] == 1)


def test_a_node_killed_while_its_head_fetches_an_image(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local", "--node-lease", "5s") as head, relaying(0) as relay:
        node = head.join("a", "--advertise", relay.url, "--port", str(relay.far_port))
        head.up("origin", resources={"memory": "256Mi", "disk": "64Mi"})
        said(head, "origin", "head -c 12000000 /dev/urandom > f")
        relay.stall_after = HALF
        head.ask("POST", "images", {"metadata": {"name": "snap"}, "spec": {"fromSandbox": {"name": "origin"}}})
        assert relay.stalled.wait(30)
        node.kill()
        failed = head.until("images/snap", phase="Failed")["status"]
        assert "node a" in failed["message"] or "cannot be reached" in failed["message"], failed
        eventually(lambda: os.listdir(head.folder / "state" / "arriving") == [])
        assert layers(head.folder) == set()
        assert not list((head.folder / "sandboxes" / "images" / "names").iterdir())


def test_a_head_killed_while_it_fetches_an_image(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local", "--node-lease", "30s") as head, relaying(0) as relay:
        node = head.join("a", "--advertise", relay.url, "--port", str(relay.far_port))
        head.up("origin", continuity={"mode": "Ephemeral"}, resources={"memory": "256Mi", "disk": "64Mi"})
        said(head, "origin", "head -c 12000000 /dev/urandom > f; sha256sum f > s")
        relay.stall_after = HALF
        head.ask("POST", "images", {"metadata": {"name": "snap"}, "spec": {"fromSandbox": {"name": "origin"}}})
        assert relay.stalled.wait(30)
        head.kill()
        relay.stall_after = None
        head.start()
        assert head.until("images/snap", phase="Failed")["status"]["reason"] == "Interrupted"
        assert not (head.folder / "state" / "arriving").exists()
        assert layers(head.folder) == set()
        assert make(head, "again", {"fromSandbox": {"name": "origin"}})["status"]["phase"] == "Ready"
        assert len(layers(head.folder)) == 1
        assert said(head, "origin", "sha256sum -c s") == "f: OK\n"
        assert node.process.poll() is None
        node.kill()
        node.start()
        assert not list((node.folder / "sandboxes" / "images" / "names").iterdir())


def test_a_node_keeps_no_image_for_a_head_that_has_fallen_silent(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local", "--node-lease", "3s") as head, relaying(0) as relay:
        node = head.join("a", "--advertise", relay.url, "--port", str(relay.far_port))
        head.up("origin", resources={"memory": "256Mi", "disk": "64Mi"})
        said(head, "origin", LARGE.replace("/opt/large", "f"))
        relay.stall_after = HALF
        head.ask("POST", "images", {"metadata": {"name": "snap"}, "spec": {"fromSandbox": {"name": "origin"}}})
        assert relay.stalled.wait(30)
        names = node.folder / "sandboxes" / "images" / "names"
        assert list(names.iterdir())
        head.process.send_signal(signal.SIGSTOP)
        eventually(lambda: not list(names.iterdir()))
        head.process.send_signal(signal.SIGCONT)
        head.until("images/snap", phase="Failed")
