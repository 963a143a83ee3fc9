"""What a program may ask of the kernel: mounts, namespaces, ptrace, setuid, clocks, keys, signals to others. Its effect is looked at."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from attackers import python

from sandmill.sandboxes import Sandbox

CALLS = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219),
    "add_key": (248, 217), "kexec_load": (246, 104), "init_module": (175, 105), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
    "fsopen": (430, 430), "move_mount": (429, 429), "open_tree": (428, 428), "mount_setattr": (442, 442), "pidfd_getfd": (438, 438),
    "reboot": (169, 142), "swapon": (167, 224), "settimeofday": (164, 170), "syslog": (103, 116),
}  # fmt: skip


def test_system_calls_that_reach_beyond_a_process_are_refused(box: Sandbox) -> None:
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: pair[column] for name, pair in CALLS.items()}
    script = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers!r}.items():
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1: print(name, ctypes.get_errno())
for name, number in (('clone3', 435), ('io_uring_setup', 425), ('unknown', 463), ('far', 100000), ('x32', 0x40000000 + 39)):
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 38: print(name, ctypes.get_errno())
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000):
    if libc.syscall({56 if column == 0 else 220}, flag | 17, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1: print('clone', hex(flag))
"""
    assert python(box, script) == ""
    assert python(box, script, user="root") == ""


def test_a_32_bit_system_call_kills(box: Sandbox) -> None:
    """`int 0x80` enters by another table, where the filter's numbers mean other things."""
    code = bytes.fromhex("b814000000cd80c3" if os.uname().machine == "x86_64" else "00000000")  # mov eax, 20 (getpid); int 0x80; ret
    script = f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write({code!r})
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print('survived')
"""
    done = box.run("python3", "-c", script)
    assert b"survived" not in done.stdout
    assert done.signal is not None


def test_setuid_gives_nothing(box: Sandbox) -> None:
    status = box.run("sh", "-c", "grep -E 'NoNewPrivs|Seccomp:|Cap(Prm|Eff|Bnd|Amb)' /proc/self/status").stdout.decode().split()
    assert dict(zip(status[::2], status[1::2], strict=True)) == {
        "CapPrm:": "0" * 16, "CapEff:": "0" * 16, "CapBnd:": "0" * 16, "CapAmb:": "0" * 16, "NoNewPrivs:": "1", "Seccomp:": "2",
    }  # fmt: skip
    box.run("sh", "-c", "cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id", user="root")
    assert box.run("/tmp/id", "-u").stdout == b"1000\n"
    assert box.run("su", "-c", "id", timeout=10).exit_code != 0


def test_init_cannot_be_killed_stopped_or_read_even_by_in_sandbox_root(box: Sandbox) -> None:
    for user in ("user", "root"):
        box.run("sh", "-c", "kill -9 1; kill -STOP 1; kill -SEGV 1", user=user)
        assert box.run("cat", "/proc/1/environ", user=user).exit_code != 0
    assert box.run("echo", "alive", timeout=5).stdout == b"alive\n"


def test_signals_reach_nobody_outside(box: Sandbox) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        for user in ("user", "root"):
            box.run("sh", "-c", f"kill -9 {bystander.pid} {os.getpid()}; kill -9 -1", user=user, timeout=10)
        assert bystander.poll() is None
        bystander.kill()
    assert box.run("echo", "alive", timeout=5).stdout == b"alive\n"


def test_the_clock_the_name_and_the_core_pattern_of_the_host_stay(box: Sandbox) -> None:
    pattern, name = Path("/proc/sys/kernel/core_pattern").read_text(), socket.gethostname()
    script = """
import ctypes, os, socket, time
def attempt(what):
    try: what(); print('done')
    except OSError: pass
attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
attempt(lambda: os.write(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY), b'|/tmp/x'))
attempt(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000'))
attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
attempt(lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt(lambda: socket.sethostname('evil'))
libc = ctypes.CDLL(None, use_errno=True)
if libc.adjtimex(ctypes.create_string_buffer(b'\\x01' * 256, 512)) != -1: print('adjtimex')
"""
    assert python(box, script) == ""
    assert "adjtimex" not in python(box, script, user="root")
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern
    assert socket.gethostname() == name
    assert abs(time.time() - time.monotonic() - (time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_MONOTONIC))) < 1
