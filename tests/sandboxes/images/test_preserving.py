"""A sandbox's files beyond its life: snapshots, forks, stops that keep them; and standing still."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec
import pytest
from image_archives import Member, docker_save, folder, layer, programs, symlink

from sandmill.errors import ConfigError, ExecFailed, ImageError, SandboxError, SandboxGone
from sandmill.sandboxes import Sandbox, block_on
from sandmill.sandboxes.images import Image, Store
from sandmill.sandboxes.images.merging import MOST_UNMERGED, lay
from sandmill.sandboxes.images.store import LayerRecord

Maker = Callable[..., Sandbox]


def output(box: Sandbox, command: str, **options: object) -> str:
    done = box.run("sh", "-c", command, timeout=10, **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode().strip()


def test_a_snapshot_holds_every_kind_of_file(make: Maker, shared: Store) -> None:
    box = make()
    output(
        box,
        "rm /etc/profile; rm -r /etc/ssl; mkdir /etc/ssl; echo own > /etc/ssl/own; mkdir -m 1777 /d; echo x > /d/a; ln /d/a /d/b; "
        "ln -s /etc/passwd /d/l; mkfifo /d/p; cp /bin/true /d/su; chmod 6755 /d/su; truncate -s 1T /d/holes; chown 5:6 /d/a; "
        "touch -d @1000 /d/old; setfattr -n user.x -v y /d/a 2>/dev/null; printf 'odd' > \"$(printf '/d/\\377')\"",
        user="root",
    )
    image = box.snapshot_filesystem("tests/kinds")
    copy = make(image="tests/kinds")
    assert copy.image == image
    look = (
        "cd /d && stat -c '%n %F %a %u %g %s %Y %h' a b l p holes old && stat -c '%a %u %Y' . && "
        "ls /etc/ssl && cat /d/l && ls /etc/profile 2>&1 | tail -c 30"
    )
    assert output(copy, look, user="root").split("\n")[1:] == output(box, look, user="root").split("\n")[1:]
    assert output(copy, "stat -c %i /d/a /d/b | sort -u | wc -l") == "1"
    assert output(copy, "stat -c %a /d/su") == "755"
    assert output(copy, "stat -c %b /d/holes") == "0"
    assert output(copy, "ls /d | tr -d 'a-z\\n' | od -An -tx1") == "ff"
    assert output(copy, "ls -A /etc/ssl") == "own"
    assert not [path for path in shared.layer_folder(image.layers[-1]).rglob("*") if path.is_file() and path.lstat().st_mode & 0o6000]


def test_files_with_many_names_stay_one_file_each(make: Maker, shared: Store) -> None:
    box = make(disk="64Mi")
    output(
        box,
        "mkdir -p a/b c; i=0; while [ $i -lt 400 ]; do echo $i > a/b/$i; i=$((i+1)); done; cp -al a/b c/d; "
        "echo all > one; mkdir names; cd names; seq 2000 | while read n; do ln ../one $n; done 2>/dev/null; ls | wc -l",
    )
    descriptors = len(os.listdir("/proc/self/fd"))
    copy = make(image=box.snapshot_filesystem(), disk="64Mi")
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4
    assert output(copy, "find a c -type f -printf '%i\n' | sort -u | wc -l; find a c -type f -links 2 | wc -l").split() == ["400", "800"]
    assert output(copy, "stat -c %h one; cat names/2000") == "2001\nall"


def test_the_same_files_are_the_same_image(make: Maker, shared: Store) -> None:
    box = make()
    box.write("a", b"x")
    first = box.snapshot_filesystem()
    assert box.snapshot_filesystem() == first
    box.write("a", b"y")
    assert box.snapshot_filesystem() != first


def test_what_runs_goes_on_after_a_snapshot_and_commands_wait_for_it(make: Maker, shared: Store) -> None:
    box = make(disk="128Mi")
    output(box, "head -c 60000000 /dev/urandom > big")
    writer = box.exec("sh", "-c", "while :; do echo x >> grow; sleep 0.005; done")

    async def both() -> tuple[object, object]:
        return await asyncio.gather(box.snapshot_filesystem.aio(), box.run.aio("cat", "grow"))

    image, done = block_on(both())
    assert done.exit_code == 0  # type: ignore[attr-defined]
    before = len(box.read("grow"))
    time.sleep(0.2)
    assert len(box.read("grow")) > before
    assert writer.returncode is None
    assert len(make(image=image, disk="128Mi").read("big")) == 60_000_000


def test_a_snapshot_survives_its_process(make: Maker, shared: Store) -> None:
    code = (
        "from sandmill.sandboxes import Sandbox\n"
        "with Sandbox.create() as box:\n"
        "    box.write('a', b'from another process')\n"
        "    box.snapshot_filesystem('tests/other')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert make(image="tests/other").read("a") == b"from another process"


def test_a_fork_shares_files_until_it_writes(make: Maker, shared: Store) -> None:
    box = make(labels={"a": "b"})
    box.write("a", b"prepared")
    sleeper = box.exec("sleep", "60")
    copies = box.fork(8, name="copy")
    try:
        assert sorted(copy.name for copy in copies) == [f"copy-{number}" for number in range(8)]
        assert {copy.read("a") for copy in copies} == {b"prepared"}
        assert {tuple(copy.labels.items()) for copy in copies} == {(("a", "b"),)}
        copies[0].write("a", b"its own")
        box.write("a", b"original's")
        assert [copy.read("a") for copy in copies[:2]] == [b"its own", b"prepared"]
        assert "sleep" not in output(copies[0], "ps -eo args=")
        grandchild = copies[0].fork(1)[0]
        copies.append(grandchild)
        assert grandchild.read("a") == b"its own"
        assert sleeper.returncode is None
        box.terminate()
        assert copies[1].read("a") == b"prepared"
    finally:
        for copy in copies:
            copy.terminate()
    shared.collect()
    assert all(shared.record(layer) is None for copy in copies for layer in copy.image.layers)


def test_an_unchanged_sandbox_is_copied_once(make: Maker, shared: Store) -> None:
    box = make(disk="64Mi")
    output(box, "head -c 20000000 /dev/urandom > big; mkdir d; ln big d/again; mkfifo d/p; ln -s big l; rm -f /etc/none")
    ((first,), (second,)) = box.fork(1), box.fork(1)
    assert first.image == second.image
    layer = shared.layer_folder(first.image.layers[-1])
    inode = (layer / "workspace" / "big").stat().st_ino
    for copy in (first, second):
        copy.terminate()
    (third,) = box.fork(1)
    assert (layer / "workspace" / "big").stat().st_ino == inode
    box.write("small", b"x")
    (fourth,) = box.fork(1)
    assert fourth.read("small") == b"x"
    assert [entry.name for entry in third.list()] == ["big", "d", "l"]
    for copy in (box, third, fourth):
        copy.terminate()
    assert not layer.exists()
    assert not list(shared.layer_folder(fourth.image.layers[-1]).glob("*"))


def test_a_cancelled_snapshot_and_a_cancelled_creation_hold_nothing(make: Maker, shared: Store) -> None:
    box = make(disk="64Mi")
    output(box, "head -c 30000000 /dev/urandom > big")
    image = box.snapshot_filesystem("tests/cancelled")

    async def cancelled(work: Coroutine[object, object, object], after_s: float) -> None:
        task = asyncio.get_running_loop().create_task(work)
        await asyncio.sleep(after_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    for number in range(6):
        box.write("changed", str(number).encode())
        block_on(cancelled(box.snapshot_filesystem.aio(), number * 0.005))
        block_on(cancelled(Sandbox.create.aio(image=image, memory="64Mi"), 0.0002 * number))
    assert output(box, "echo alive") == "alive"
    box.terminate()
    deadline = time.monotonic() + 5
    while any(one.in_use for one in shared.list()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [one for one in shared.list() if one.in_use]


def test_an_end_in_the_middle_of_a_snapshot_holds_nothing(make: Maker, shared: Store) -> None:
    for pause_s in (0.001, 0.01, 0.03):
        box = make(disk="64Mi")
        output(box, "head -c 30000000 /dev/urandom > big")

        async def both(box: Sandbox, pause_s: float) -> None:
            task = asyncio.get_running_loop().create_task(box.snapshot_filesystem.aio())
            await asyncio.sleep(pause_s)
            await box.terminate.aio()
            with contextlib.suppress(SandboxError):
                await task

        block_on(both(box, pause_s))
    assert not [one for one in shared.list() if one.in_use]


@pytest.mark.parametrize("n", [0, -1])
def test_a_fork_into_nothing_is_refused(make: Maker, n: int) -> None:
    with pytest.raises(ImageError, match="one or more"):
        make().fork(n)


def test_a_frozen_sandbox_stands_still_and_can_be_read(make: Maker) -> None:
    box = make()
    process = box.exec("sh", "-c", "while :; do echo x >> grow; done")
    beside = box.exec("sh", "-c", "while :; do echo x >> beside; sleep 0.001; done")
    while box.run("test", "-s", "beside").exit_code != 0:
        time.sleep(0.01)
    box.freeze()
    box.freeze()
    assert box.frozen
    before = box.read("grow"), box.read("beside")
    time.sleep(0.2)
    assert (box.read("grow"), box.read("beside")) == before
    with pytest.raises(ExecFailed, match="thaw it first"):
        box.run("true")
    box.write("while", b"frozen")
    box.thaw()
    box.thaw()
    time.sleep(0.1)
    assert len(box.read("beside")) > len(before[1])
    assert process.returncode is None
    assert beside.returncode is None
    assert box.read("while") == b"frozen"


def test_a_timeout_kills_a_frozen_command(make: Maker) -> None:
    box = make()
    keep = box.exec("sleep", "60")
    process = box.exec("sh", "-c", "sleep 60 & sleep 60", timeout=0.3)
    box.freeze()
    process.wait(timeout=5)
    assert process.timed_out
    box.thaw()
    assert keep.returncode is None
    assert output(box, "ps -eo args= | grep -c '^sleep'") == "1"


def test_a_fork_bomb_can_be_frozen_and_thawed(make: Maker) -> None:
    box = make()
    box.exec("bash", "-c", "f() { f | f & f; }; f 2>/dev/null")
    time.sleep(0.2)
    box.freeze()
    box.thaw()
    box.kill_processes()
    assert output(box, "echo alive") == "alive"


def test_a_frozen_sandbox_ends_like_any_other(make: Maker) -> None:
    box = make()
    box.exec("sleep", "60")
    box.freeze()
    began = time.monotonic()
    box.terminate()
    assert time.monotonic() - began < 1
    with pytest.raises(SandboxGone):
        box.thaw()


def test_killing_the_owner_of_a_frozen_sandbox_leaves_no_process() -> None:
    mark = f"60.{os.getpid()}"
    code = (
        "import os, sys, time\nfrom sandmill.sandboxes import Sandbox\n"
        f"box = Sandbox.create(); box.exec('sleep', '{mark}'); box.exec('sleep', '{mark}'); box.freeze(); print('frozen', flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"frozen\n"
    assert len(processes(mark)) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 5
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes(mark) == []


def processes(argument: str) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes() == f"sleep\0{argument}\0".encode():
                found.append(place.parent.name)
        except OSError:
            continue
    return found


def test_stop_and_start_with_and_without_files(make: Maker, shared: Store) -> None:
    box = make(continuity="Snapshotted", env={"A": "b"}, labels={"c": "d"})
    for round in range(3):
        box.write(f"file{round}", b"kept")
        image = box.halt()
        assert image is not None
        assert not box.alive
        assert shared.find(f"stopped/{box.id}") == image
        with pytest.raises(SandboxGone):
            box.read("file0")
        box.start()
        assert box.alive
        assert sorted(entry.name for entry in box.list()) == [f"file{number}" for number in range(round + 1)]
    assert output(box, "echo $A") == "b"
    assert f"stopped/{box.id}" not in shared.names()
    with pytest.raises(SandboxError, match="is running"):
        box.start()
    assert box.halt(keep=False) is None
    box.start()
    box.terminate()


def test_one_of_two_starts_at_once_wins(make: Maker, shared: Store) -> None:
    box = make()
    box.halt()

    async def twice() -> list[object]:
        return await asyncio.gather(box.start.aio(), box.start.aio(), return_exceptions=True)

    won, lost = sorted(block_on(twice()), key=lambda one: isinstance(one, Exception))
    assert won is box
    assert isinstance(lost, SandboxError)
    assert output(box, "echo alive") == "alive"


def test_an_ephemeral_sandbox_starts_empty(make: Maker, shared: Store) -> None:
    box = make()
    box.write("a", b"x")
    assert box.halt() is None
    box.start()
    assert box.list() == []
    box.write("b", b"x")
    assert box.halt(keep=True) is not None
    assert box.start().read("b") == b"x"


def test_a_limit_keeps_the_files_of_a_snapshotted_sandbox(make: Maker, shared: Store) -> None:
    box = make(continuity="Snapshotted", idle_timeout=0.3)
    box.write("a", b"kept")
    deadline = time.monotonic() + 10
    while box.kept is None and time.monotonic() < deadline:
        time.sleep(0.05)
    while box.alive:
        time.sleep(0.05)
    shared.prune()
    assert box.start().read("a") == b"kept"
    box.terminate()


def test_terminating_a_stopped_sandbox_forgets_its_files(make: Maker, shared: Store) -> None:
    box = make()
    box.halt(keep=True)
    assert f"stopped/{box.id}" in shared.names()
    box.terminate()
    assert f"stopped/{box.id}" not in shared.names()


def test_a_tree_too_deep_for_an_image_is_named_and_the_sandbox_lives_on(make: Maker, shared: Store) -> None:
    box = make()
    output(box, "i=0; while [ $i -lt 300 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done")
    with pytest.raises(ImageError, match="nested more than"):
        box.halt(keep=True)
    assert output(box, "echo alive") == "alive"
    box.remove("d", recursive=True)
    assert box.halt(keep=True) is not None


def test_a_continuity_that_is_none_is_refused(make: Maker) -> None:
    with pytest.raises(ConfigError, match="Ephemeral or Snapshotted"):
        make(continuity="forever")


def test_many_stops_and_starts_stay_within_what_an_overlay_takes(make: Maker, shared: Store) -> None:
    box = make(continuity="Snapshotted")
    output(box, "mkdir folder; touch folder/first; touch once")
    for round in range(MOST_UNMERGED + 4):
        kept = box.halt()
        assert kept is not None
        assert len(kept.layers) <= MOST_UNMERGED
        box.start()
        if round == 3:
            output(box, "rm once; rm /etc/profile; rm -r folder; mkdir folder; touch folder/second", user="root")
        box.write("count", str(round).encode())
        box.write(f"round{round}", b"x")
    assert box.read("count") == str(MOST_UNMERGED + 3).encode()
    names = {entry.name for entry in box.list()}
    assert names == {"count", "folder", *(f"round{round}" for round in range(MOST_UNMERGED + 4))}
    assert [entry.name for entry in box.list("folder")] == ["second"]
    assert "profile" not in {entry.name for entry in box.list("/etc")}
    box.terminate()


def test_merged_layers_look_like_the_layers_they_were(tmp_path: Path, make: Maker, shared: Store) -> None:
    """Every way in which a name of one layer can meet the same name of the next."""
    kinds = {
        "absent": [],
        "file": [Member("n", b"file")],
        "folder": [folder("n"), Member("n/in", b"x")],
        "other": [folder("n", mode=0o700), Member("n/other", b"x")],
        "opaque": [folder("n"), Member("n/.wh..wh..opq"), Member("n/own", b"x")],
        "gone": [Member(".wh.n")],
        "link": [symlink("n", "/tmp")],
    }
    layers = [[], [], []]  # type: list[list[Member]]
    for number, combination in enumerate(itertools.product(kinds, repeat=3)):
        for depth, kind in enumerate(combination):
            layers[depth] += [m._replace(name=re.sub(r"(^|\.)n(?=/|$)", rf"\g<1>n{number}", m.name)) for m in kinds[kind]]
    tars = [layer(*programs("sh", "find", "sort")), *(layer(Member(f"level{depth}"), *members) for depth, members in enumerate(layers))]
    image = Image.load(f"docker-archive:{docker_save(tmp_path / 'image.tar', tars)}")
    with shared.draft() as draft:
        for part in image.layers[-2:]:
            lay(shared.layer_folder(part), draft)
        shared.keep(draft, LayerRecord(digest="sha256:" + "ab" * 32, bytes=1))
    flat = msgspec.structs.replace(image, layers=(*image.layers[:-2], "sha256:" + "ab" * 32))
    shared.save(flat)
    look = "find / -xdev -name 'n*' -printf '%p %y %m %l\\n' -o -path '/n*' -printf '%p %y %m\\n' | sort"
    seen = output(make(image=image), look)
    assert len(seen.splitlines()) > 300
    assert output(make(image=flat), look) == seen
    shared.unpin("sha256:" + "ab" * 32)
