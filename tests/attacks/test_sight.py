"""What a program may look for: the host's files, /proc, /sys, /dev, mounts, other sandboxes, descriptors that were left open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attackers import Maker, python

from sandmill.sandboxes import Sandbox

HOST_SECRETS = (
    "/root/.ssh",
    "/etc/shadow",
    "/etc/gshadow",
    "/old_root",
    "/boot",
    "/var/lib/dpkg",
    "/var/lib/sandmill",
    "/usr/local/etc",
)


@pytest.mark.parametrize("path", HOST_SECRETS)
def test_files_of_the_host_do_not_exist(box: Sandbox, path: str) -> None:
    assert python(box, f"import os; print(os.path.lexists({path!r}))", user="root") == "False\n"


def test_proc_shows_only_its_own_processes_and_nothing_of_the_host(box: Sandbox) -> None:
    script = """
import os
pids = sorted(int(p) for p in os.listdir('/proc') if p.isdigit())
assert pids[0] == 1 and len(pids) <= 3, pids
for name in ('cmdline', 'config.gz', 'keys', 'modules', 'interrupts', 'partitions', 'diskstats', 'kmsg', 'kcore', 'sched_debug', 'locks',
             'sys/kernel/random/boot_id'):
    try: text = open('/proc/' + name, 'rb').read(10)
    except OSError: continue
    assert text == b'', name
for name in ('acpi', 'bus', 'driver', 'fs', 'irq', 'scsi', 'tty', 'pressure'):
    if os.path.isdir('/proc/' + name): assert os.listdir('/proc/' + name) == [], name
for name in ('environ', 'maps', 'mem', 'stack', 'auxv'):
    try: assert open('/proc/1/' + name, 'rb').read(100) == b'', name
    except OSError: pass
for name in ('root', 'cwd', 'exe', 'fd/3', 'fd/4'):
    try: print('open', name, os.readlink('/proc/1/' + name))
    except OSError: pass
assert open('/proc/1/cmdline').read().strip('\\0') == 'sandmill'
assert all(line.split(':', 2)[2].strip() == '/' for line in open('/proc/self/cgroup'))
assert int(open('/proc/meminfo').readline().split()[1]) == 256 << 10
for name in ('kernel/core_pattern', 'kernel/hostname', 'vm/drop_caches'):
    try: open('/proc/sys/' + name, 'w').write('x'); print('wrote', name)
    except OSError: pass
print('done')
"""
    assert python(box, script) == "done\n"
    assert python(box, script, user="root") == "done\n"


def test_mounts_name_no_path_of_the_host(box: Sandbox) -> None:
    mounts = python(box, "print(open('/proc/self/mountinfo').read())")
    for word in (str(Path.cwd()), "/var/lib/sandmill", "/home/", "ext4", str(os.getpid())):
        assert word not in mounts, mounts


def test_dev_is_minimal_and_sys_is_empty(box: Sandbox) -> None:
    assert box.run("ls", "/dev").stdout.decode().split() == sorted(
        ["fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]
    )
    assert box.run("ls", "-A", "/sys").stdout == b""
    for user in ("user", "root"):
        assert box.run("mknod", "sda", "b", "8", "0", user=user).exit_code == 1
        assert box.run("sh", "-c", "echo x > /dev/new; rm -f /dev/null", user=user).exit_code == 1
    assert box.run("sh", "-c", "echo x > /dev/null && head -c 3 /dev/zero | od -An -tx1").stdout == b" 00 00 00\n"


def test_a_command_inherits_three_descriptors_and_no_more(box: Sandbox) -> None:
    script = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    with open("/etc/hostname"):
        assert python(box, script) == "[0, 1, 2, 3]\n"  # 3: the listing itself
        assert box.exec("python3", "-c", script).stdout.read() == "[0, 1, 2, 3]\n"


def test_two_sandboxes_share_nothing(make: Maker) -> None:
    one, other = make(), make()
    one.run("sh", "-c", "echo secret > /tmp/x; echo secret > /dev/shm/x; ipcmk -Q")
    done = other.run("sh", "-c", "ls /tmp /dev/shm; ipcs -q; hostname; ps -e | wc -l")
    assert b"x" not in done.stdout.split(b"IPC")[0].replace(b"/dev/shm:", b"").replace(b"/tmp:", b"") or b"secret" not in done.stdout
    assert other.run("cat", "/tmp/x").exit_code == 1
    assert other.run("cat", "/dev/shm/x").exit_code == 1
