"""What a program may try with resources: processes, memory, disk, inodes, processor. Each looks at what neighbours and the host feel."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from attackers import Maker, python

from sandmill.sandboxes import Sandbox


def test_a_fork_bomb_stays_at_256_and_neighbours_run(make: Maker) -> None:
    bombed, neighbour = make(), make()
    bomb = "import os, time\nwhile True:\n  try:\n    os.fork()\n  except OSError:\n    time.sleep(0.001)"
    process = bombed.exec("python3", "-c", bomb, timeout=2)
    time.sleep(1)
    assert neighbour.run("echo", "fine", timeout=10).stdout == b"fine\n"
    [pids] = Path("/sys/fs/cgroup/pids").glob(f"**/sandmill-{os.getpid()}-*/{bombed._birth.slot}")  # type: ignore[union-attr]
    assert 200 < int((pids / "pids.current").read_text()) <= 256
    assert process.wait(timeout=10) == -9
    assert process.timed_out
    assert bombed.run("sh", "-c", "ls -d /proc/[0-9]* | wc -l", timeout=10).stdout in (b"3\n", b"4\n", b"5\n")


def test_a_fork_bomb_beside_another_command_dies_alone(box: Sandbox) -> None:
    bystander = box.exec("sleep", "60")
    bomb = "import os\nwhile True:\n  try:\n    os.fork(); os.setsid()\n  except OSError:\n    pass"
    assert box.run("python3", "-c", bomb, timeout=1).timed_out
    args = box.run("ps", "-eo", "args=", timeout=10).stdout.decode().splitlines()
    assert [line for line in args if "python3" in line] == []
    assert "sleep 60" in args
    assert bystander.returncode is None


def test_a_memory_hog_dies_alone(make: Maker) -> None:
    box = make(memory="64Mi")
    bystander = box.exec("sleep", "60")
    done = box.run("python3", "-c", "b = bytearray(200 << 20)", timeout=30)
    assert done.signal == 9
    assert not done.timed_out
    assert box.run("echo", "alive").stdout == b"alive\n"
    assert bystander.returncode is None


def test_a_full_disk_is_enospc_at_the_limit(make: Maker) -> None:
    box = make(disk="8Mi")
    done = box.run("sh", "-c", "head -c 100000000 /dev/zero > big; wc -c < big; rm big; echo ok > small; cat small")
    size, small = done.stdout.split()
    assert (8 << 20) - (64 << 10) <= int(size) <= 8 << 20
    assert b"No space left" in done.stderr
    assert small == b"ok"


def test_a_flood_of_files_ends_inside_and_leaves_the_host_its_inodes(make: Maker) -> None:
    free = os.statvfs("/var/lib").f_ffree
    fill = """
n = 0
try:
    while True:
        open(f'f{n}', 'w').close()
        n += 1
except OSError as e:
    print(e.errno, n)
"""
    box = make(disk="4Mi")
    code, count = map(int, python(box, fill, timeout=120).split())
    assert code == errno.ENOSPC
    assert count < 100_000
    assert os.statvfs("/var/lib").f_ffree > free - 1000
    assert box.run("sh", "-c", "rm -f f1* && echo ok > g && cat g").stdout == b"ok\n"


@pytest.mark.parametrize("place", ["/dev/shm", "/tmp", "/var/tmp", "/home/user"])
def test_no_folder_lies_outside_the_disk_limit(make: Maker, place: str) -> None:
    done = make(disk="4Mi").run("sh", "-c", f"head -c 9000000 /dev/zero > {place}/big; wc -c < {place}/big")
    assert int(done.stdout) <= 4 << 20


def test_the_cpu_quota_holds(make: Maker) -> None:
    used = python(make(cpu=0.2), "import os, time\nend = time.time() + 1\nwhile time.time() < end: pass\nprint(sum(os.times()[:2]))")
    assert float(used) < 0.45


def test_a_flood_of_requests_for_processes_leaves_the_host_small(box: Sandbox) -> None:
    threads = threading.active_count()
    for _ in range(50):
        box.exec("true").wait()
    assert threading.active_count() <= threads + 1
