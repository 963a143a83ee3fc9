"""What a program inside a sandbox may try. Each test is one attack and looks at its effect, not at the wall."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandmill.errors import SandboxFileError
from sandmill.sandboxes import Sandbox

Maker = Callable[..., Sandbox]


def python(box: Sandbox, script: str, *, user: str = "user", timeout: float = 30) -> str:
    done = box.run("python3", "-c", script, user=user, timeout=timeout, merge_stderr=True)
    return done.stdout.decode()


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


@pytest.mark.parametrize("place", ["/dev/shm", "/tmp", "/var/tmp", "/home/user"])
def test_no_folder_lies_outside_the_disk_limit(make: Maker, place: str) -> None:
    done = make(disk="4Mi").run("sh", "-c", f"head -c 9000000 /dev/zero > {place}/big; wc -c < {place}/big")
    assert int(done.stdout) <= 4 << 20


def test_the_cpu_quota_holds(make: Maker) -> None:
    used = python(make(cpu=0.2), "import os, time\nend = time.time() + 1\nwhile time.time() < end: pass\nprint(sum(os.times()[:2]))")
    assert float(used) < 0.45


HOST_SECRETS = (
    "/work",
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


def test_there_is_no_network_but_its_own_loopback(box: Sandbox) -> None:
    script = """
import errno, socket
def attempt(family, address):
    s = socket.socket(family); s.settimeout(2)
    try: s.connect(address); print('connected', address)
    except OSError as e: print(errno.errorcode.get(e.errno, e))
attempt(socket.AF_INET, ('169.254.169.254', 80))
attempt(socket.AF_INET, ('1.1.1.1', 53))
attempt(socket.AF_INET6, ('2606:4700:4700::1111', 53))
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()
attempt(socket.AF_INET, s.getsockname())
"""
    lines = python(box, script).splitlines()
    assert lines[:2] == ["ENETUNREACH", "ENETUNREACH"]
    assert lines[2] in ("ENETUNREACH", "EADDRNOTAVAIL")
    assert lines[3].startswith("connected")


def test_the_hosts_loopback_and_abstract_sockets_are_not_reachable(box: Sandbox) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        server.listen()
        abstract.bind("\0sandmill-test")
        abstract.listen()
        script = f"""
import socket
for family, address in ((socket.AF_INET, {server.getsockname()!r}), (socket.AF_UNIX, '\\0sandmill-test')):
    try: socket.socket(family).connect(address); print('connected')
    except ConnectionRefusedError: print('refused')
"""
        assert python(box, script) == "refused\nrefused\n"


def test_a_unix_socket_of_the_host_below_usr_is_not_reachable(box: Sandbox) -> None:
    """A bind mount of the program folder would connect to it; an overlay does not."""
    path = f"/usr/share/sandmill-test-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(path)
            os.chmod(path, 0o777)
            server.listen()
            attempt = f"socket.socket(socket.AF_UNIX).connect({path!r}); print('connected')"
            script = f"import socket\ntry: {attempt}\nexcept OSError as e: print(e.errno)"
            assert int(python(box, script)) in (errno.ECONNREFUSED, errno.ENOENT)
        finally:
            Path(path).unlink(missing_ok=True)


def test_socket_families_beyond_local_and_internet_are_closed(box: Sandbox) -> None:
    script = """
import errno, socket
for family, kind, protocol in ((40, 1, 0), (17, 3, 0), (38, 5, 0), (2, 3, 1), (16, 3, 9), (31, 3, 0)):
    try: socket.socket(family, kind, protocol); print('made', family)
    except OSError as e: print(errno.errorcode[e.errno])
"""
    assert set(python(box, script, user="root").split()) <= {"EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT"}


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


def test_a_command_inherits_three_descriptors_and_no_more(box: Sandbox) -> None:
    script = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    with open("/etc/hostname"):
        assert python(box, script) == "[0, 1, 2, 3]\n"  # 3: the listing itself
        assert box.exec("python3", "-c", script).stdout.read() == "[0, 1, 2, 3]\n"


def test_links_planted_in_the_sandbox_lead_the_host_nowhere(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    box.run("ln", "-s", str(secret), "link")
    box.run("ln", "-s", "/proc/1/root" + str(secret), "magic")
    box.run("ln", "-s", "/proc/self/mem", "mem")
    box.run("ln", "-s", "/etc/shadow", "shadow")
    for name in ("link", "magic", "mem", "shadow"):
        with pytest.raises(SandboxFileError):
            box.read(name)
    with pytest.raises(SandboxFileError):
        box.write("magic", b"x")
    with pytest.raises(SandboxFileError):
        box.write("mem", b"x")
    box.run("ln", "-s", str(tmp_path), "folder")
    with pytest.raises(SandboxFileError):
        box.list("folder")
    box.write("folder2/a", b"x")
    assert secret.read_text() == "host"
    assert list(tmp_path.iterdir()) == [secret]


def test_special_files_planted_in_the_sandbox_do_not_stop_the_host(box: Sandbox) -> None:
    box.run("mkfifo", "pipe")
    box.run("python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('sock')")
    for name in ("pipe", "sock", "/dev/zero", "/dev/tty", "."):
        with pytest.raises(SandboxFileError):
            box.read(name)
        with pytest.raises(SandboxFileError):
            box.write(name, b"x")
    assert box.run("echo", "alive").stdout == b"alive\n"


def test_the_host_acts_with_the_users_rights_inside(box: Sandbox) -> None:
    with pytest.raises(SandboxFileError) as refused:
        box.write("/etc/passwd", b"x")
    assert refused.value.errno == errno.EACCES
    with pytest.raises(SandboxFileError):
        box.list("/root")
    with pytest.raises(SandboxFileError) as read_only:
        box.write("/usr/bin/new", b"x", user="root")
    assert read_only.value.errno == errno.EROFS
    box.write("/root/mine", b"x", user="root")
    assert [entry.name for entry in box.list("/root", user="root")] == ["mine"]
    assert box.run("stat", "-c", "%u %a", "/root/mine", user="root").stdout == b"0 644\n"


def test_a_deep_tree_is_removed_without_recursion(box: Sandbox) -> None:
    box.run("python3", "-c", "import os\nfor _ in range(700): os.mkdir('d'); os.chdir('d'); open('f', 'w').close()", timeout=20)
    assert box.run("mkdir", "-p", "wide/a/b", "wide/c").exit_code == 0
    box.remove("d", recursive=True)
    box.remove("wide", recursive=True)
    assert box.list() == []


def test_a_hostile_names_folder_listing_is_data(box: Sandbox) -> None:
    names = [b"\xff\xfe", b"\x1b[2J", b"a\nb", b"-rf", b"<script>"]
    box.run("python3", "-c", f"[open(n, 'w').close() for n in {names!r}]")
    listed = {os.fsencode(entry.name) for entry in box.list()}
    assert listed == set(names)
    for entry in box.list():
        box.remove(entry.name)
    assert box.list() == []


def test_two_sandboxes_share_nothing(make: Maker) -> None:
    one, other = make(), make()
    one.run("sh", "-c", "echo secret > /tmp/x; echo secret > /dev/shm/x; ipcmk -Q")
    done = other.run("sh", "-c", "ls /tmp /dev/shm; ipcs -q; hostname; ps -e | wc -l")
    assert b"x" not in done.stdout.split(b"IPC")[0].replace(b"/dev/shm:", b"").replace(b"/tmp:", b"") or b"secret" not in done.stdout
    assert other.run("cat", "/tmp/x").exit_code == 1
    assert other.run("cat", "/dev/shm/x").exit_code == 1


def test_a_flood_of_requests_for_processes_leaves_the_host_small(box: Sandbox) -> None:
    threads = threading.active_count()
    for _ in range(50):
        box.exec("true").wait()
    assert threading.active_count() <= threads + 1
