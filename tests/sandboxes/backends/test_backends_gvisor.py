"""gVisor: a kernel of its own, bounded, and gone with its owner however that ends."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from places import SMALL, environment, gvisor_left

from sandmill.errors import SandboxGone, Unsupported
from sandmill.sandboxes import Egress, Sandbox, block_on
from sandmill.sandboxes.backends.choice import load
from sandmill.sandboxes.backends.gvisor.place import sweep
from sandmill.sandboxes.backends.seam import BackendName

OWNER = """
import os, sys, time
from sandmill import Sandbox
box = Sandbox.create(backend="gvisor", memory="256Mi", disk="32Mi")
box.exec("sh", "-c", "trap '' TERM; (setsid sleep 1000 &); sleep 1000")
child = os.fork() if "fork" in sys.argv else 0
if "fork" in sys.argv and not child:
    time.sleep(120)
    os._exit(0)
print("ready", child, flush=True)
sys.stdin.readline()
"""


def create(**options: object) -> Sandbox:
    return Sandbox.create(**SMALL | {"backend": "gvisor"} | options)  # type: ignore[arg-type]


def until(true: Callable[[], bool], within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runsc_processes(root: Path) -> list[str]:
    """Command lines of runsc's processes that belong to this state folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if str(root) in line and "runsc" in line:
            found.append(line.replace("\0", " "))
    return found


def groups(root: Path) -> list[str]:
    names = [path.name for path in (root / "gvisor").iterdir()] if (root / "gvisor").exists() else []
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if any(name in folder for name in names)]


def test_the_kernel_is_another_one() -> None:
    with create() as box:
        assert box.run("uname", "-r").stdout.decode().strip() != platform.release()
        assert box.lacks is None


def test_memory_is_bounded_and_its_end_says_so() -> None:
    with create(memory="64Mi") as box:
        with pytest.raises(SandboxGone):
            box.run("python3", "-c", "x = bytearray(1 << 30); print(len(x))", timeout=60)
        assert box.gone_reason == "its memory was used up"
    assert gvisor_left() == []


def test_disk_is_bounded() -> None:
    with create(disk="8Mi") as box:
        for folder in ("/workspace", "/tmp", "/var/tmp", "/home/user"):
            done = box.run("sh", "-c", f"head -c 20000000 /dev/zero > {folder}/big; rm {folder}/big")
            assert b"No space left" in done.stderr, folder
        assert box.run("sh", "-c", "echo x > /usr/x || echo x > /x || echo no").stdout == b"no\n"


def test_it_ends_when_runsc_is_killed() -> None:
    with create() as box:
        sleeper = box.exec("sleep", "60")
        machine = box._machine  # type: ignore[attr-defined]
        os.kill(machine._process.pid, signal.SIGKILL)
        with pytest.raises(SandboxGone):
            sleeper.wait(timeout=20)
    assert gvisor_left() == []
    assert not [line for line in runsc_processes(Path("/")) if machine.id in line]


@pytest.mark.parametrize(
    ("way", "how"),
    [(signal.SIGKILL, "alone"), (signal.SIGKILL, "fork"), (signal.SIGTERM, "alone"), (None, "alone")],
    ids=["killed", "killed beside a forked child", "terminated", "ended"],
)
def test_it_ends_with_its_owner(way: signal.Signals | None, how: str, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SANDMILL_STATE": str(tmp_path)},
    )
    try:
        assert owner.stdout is not None
        assert owner.stdin is not None
        ready, child = owner.stdout.readline().split()
        assert ready == "ready"
        assert runsc_processes(tmp_path)
        if way is not None:
            owner.send_signal(way)
        owner.stdin.close()
        owner.stdout.close()
        owner.wait(30)
        until(lambda: not runsc_processes(tmp_path))
        if int(child):
            os.kill(int(child), signal.SIGKILL)
    finally:
        owner.kill()
        owner.wait()
    left = groups(tmp_path)
    if way is None:
        assert left == []
        assert list((tmp_path / "gvisor").iterdir()) == []
    with environment({"SANDMILL_STATE": str(tmp_path)}):
        assert sweep("runsc") == (0 if way is None else 1)
    assert not any(Path(group).exists() for group in left)
    assert list((tmp_path / "gvisor").iterdir()) == []


def test_what_it_cannot_give_is_refused_before_anything_starts() -> None:
    with pytest.raises(Unsupported, match="backend gvisor cannot give a sandbox a network"):
        create(network=Egress.open())
    with pytest.raises(Unsupported, match="backend gvisor cannot start from an image"):
        create(image="any")


def test_it_knows_that_it_is_usable() -> None:
    async def ask() -> bool:
        return (await load(BackendName.GVISOR).usable()).ok

    assert block_on(ask())
