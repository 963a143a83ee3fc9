"""What outlasts a sandbox, by the same code against this machine and against a server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from server_process import KEY, Server

import sandmill
from sandmill.errors import ExecFailed, ImageError, SandboxError, SandboxGone
from sandmill.sandboxes import Egress, Image

SMALL = {"memory": "256Mi", "disk": "32Mi"}


@pytest.fixture
def box(where: str) -> Iterator[sandmill.Sandbox]:
    with sandmill.Sandbox.create(**SMALL, env={"GREETING": "hello"}) as box:
        box.run("sh", "-c", "echo work > w; echo home > ~/h; mkdir -p ~/d/e; chmod 700 ~/d/e", timeout=30)
        yield box


def said(box: sandmill.Sandbox, script: str) -> str:
    return box.run("sh", "-c", script, timeout=30).stdout.decode()


def test_an_image_has_every_file_and_can_be_named_three_ways(box: sandmill.Sandbox) -> None:
    image = box.snapshot_filesystem("team/prepared:1")
    box.write("w", "changed\n")
    assert isinstance(image, Image)
    for reference in (image, image.digest, "team/prepared:1"):
        with sandmill.Sandbox.create(**SMALL, image=reference) as copy:
            assert said(copy, "cat w ~/h; stat -c %a ~/d/e") == "work\nhome\n700\n"
            assert copy.image == image
    newer = box.snapshot_filesystem("team/prepared:1")
    with sandmill.Sandbox.create(**SMALL, image="team/prepared:1") as copy:
        assert (copy.image, said(copy, "cat w")) == (newer, "changed\n")


def test_processes_go_on_after_a_snapshot(box: sandmill.Sandbox) -> None:
    process = box.exec("sh", "-c", "read line; echo $line", stdin=sandmill.sandboxes.PIPE)
    box.snapshot_filesystem()
    process.stdin.write("still here\n")
    assert (process.stdout.read(), process.wait(timeout=30)) == ("still here\n", 0)


def test_a_name_that_no_image_can_have(box: sandmill.Sandbox) -> None:
    with pytest.raises(ImageError, match="name"):
        box.snapshot_filesystem("-x y")
    assert said(box, "cat w") == "work\n"


def test_forks_share_files_until_they_write(box: sandmill.Sandbox) -> None:
    forks = box.fork(3, name="twin")
    try:
        assert [fork.name for fork in sorted(forks, key=lambda one: one.name)] == ["twin-0", "twin-1", "twin-2"]
        assert len({fork.id for fork in [box, *forks]}) == 4
        for number, fork in enumerate(forks):
            assert said(fork, f"cat w ~/h; echo $GREETING; echo {number} > w") == "work\nhome\nhello\n"
        assert [said(fork, "cat w") for fork in [*forks, box]] == ["0\n", "1\n", "2\n", "work\n"]
        (again,) = forks[0].fork(1)
        with again:
            assert said(again, "cat w") == "0\n"
    finally:
        for fork in forks:
            fork.terminate()
    assert said(box, "cat w") == "work\n"


def test_no_forks_are_none(box: sandmill.Sandbox) -> None:
    with pytest.raises(ImageError, match="one or more"):
        box.fork(0)


def test_frozen_processes_stand_still_and_files_do_not(box: sandmill.Sandbox) -> None:
    process = box.exec("sh", "-c", "while :; do echo x >> ticks; sleep 0.02; done")
    while len(said(box, "cat ticks 2>/dev/null")) < 4:
        continue
    box.freeze()
    box.freeze()
    assert box.frozen
    before = box.read("ticks")
    with pytest.raises(ExecFailed, match="frozen"):
        box.exec("true")
    box.write("given", b"meanwhile")
    time.sleep(0.2)
    assert box.read("ticks") == before
    image = box.snapshot_filesystem()
    box.thaw()
    box.thaw()
    assert (box.frozen, said(box, "cat given")) == (False, "meanwhile")
    deadline = time.monotonic() + 20
    while box.read("ticks") == before:
        assert time.monotonic() < deadline
    process.kill()
    with sandmill.Sandbox.create(**SMALL, image=image) as copy:
        assert copy.read("ticks") == before


def test_a_halt_that_keeps_and_a_start(box: sandmill.Sandbox) -> None:
    image = box.halt(keep=True)
    assert (box.alive, image) == (False, box.kept)
    assert image is not None
    with pytest.raises(SandboxGone):
        box.run("true")
    with sandmill.Sandbox.create(**SMALL, image=f"stopped/{box.id}") as other:
        assert said(other, "cat ~/h") == "home\n"
    assert box.start() is box
    assert (box.alive, box.kept, said(box, "cat w ~/h; echo $GREETING")) == (True, None, "work\nhome\nhello\n")
    with pytest.raises(SandboxError, match="is running"):
        box.start()
    box.write("w", "second\n")
    box.halt(keep=True)
    box.start()
    assert said(box, "cat w ~/h") == "second\nhome\n"


def test_a_halt_that_keeps_nothing_and_a_start(box: sandmill.Sandbox) -> None:
    name = box.name
    assert box.halt() is None
    box.start()
    assert (box.name, said(box, "ls -A . ~; echo $GREETING").split()[-1]) == (name, "hello")
    assert not {entry.name for folder in (".", "/home/user") for entry in box.list(folder)} & {"w", "h", "d"}


def test_continuity_decides_what_a_halt_keeps(where: str) -> None:
    with sandmill.Sandbox.create(**SMALL, continuity="Snapshotted") as box:
        box.write("w", "kept")
        assert box.halt() is not None
        box.start()
        assert box.read("w") == b"kept"


def test_what_a_policy_refused_is_told_on_either_side(where: str) -> None:
    ask = "import socket\nfor name in ('b.org', 'b.org', 'c.org'):\n try: socket.gethostbyname(name)\n except OSError: pass"
    with sandmill.Sandbox.create(**SMALL, network=Egress.allow("example.org")) as box:
        assert box.blocked == ()
        box.run("python3", "-c", ask, timeout=30)
        refused = box.blocked
        assert {(one.host, one.port) for one in refused} == {("b.org", 53), ("c.org", 53)}
        assert next(one.count for one in refused if one.host == "b.org") > 1
    assert box.blocked == refused


def test_terminate_leaves_no_image_of_a_halted_sandbox(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    box = sandmill.Sandbox.create(**SMALL, server=server.url)
    box.halt(keep=True)
    box.terminate()
    named = [image for image in server.ask("GET", "images").json["items"] if f"stopped/{box.id}" in image["spec"].get("tags", ())]
    assert named == []


def test_one_that_its_server_stopped_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    with sandmill.Sandbox.create(**SMALL, server=server.url, continuity="Snapshotted") as box:
        box.write("w", "kept")
        server.ask("PATCH", f"sandboxes/{box.id}", {"spec": {"state": "Stopped"}}, {"Content-Type": "application/merge-patch+json"})
        server.until(f"sandboxes/{box.id}", phase="Stopped")
        box.start()
        assert box.read("w") == b"kept"
