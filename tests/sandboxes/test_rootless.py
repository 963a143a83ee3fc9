"""Without root: isolation holds, what is lost is said in one sentence, and where isolation cannot be had nothing runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AS_NOBODY = """
import asyncio, concurrent.futures.thread, json, logging, os, shutil, subprocess, sys, time
import sandmill.sandboxes
from sandmill.sandboxes import Egress, Sandbox, list_sandboxes, probe
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
logging.basicConfig(stream=sys.stderr, format="%(message)s")
facts = {}
def fact(name, value): facts[name] = value
"""

BODY = """
bomb = "import os\\nwhile True:\\n  try:\\n    os.fork(); os.setsid()\\n  except OSError:\\n    pass"
with Sandbox.create(memory="128Mi", disk="4Mi", files={"a/b": b"in"}) as box:
    fact("uid", box.run("id", "-u").stdout.decode())
    fact("lacks", box.lacks)
    fact("capabilities", box.run("grep", "CapEff", "/proc/self/status").stdout.decode().split()[1])
    COUNT = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
    fact("processes", box.run("python3", "-c", COUNT).stdout.decode())
    fact("host", box.run("sh", "-c", "ls -d /work /root/.ssh /etc/shadow /home/user/.bashrc; ls -A /sys | wc -l").stdout.decode())
    fact("network", box.run("python3", "-c", "import socket; socket.socket().connect(('1.1.1.1', 53))").stderr.decode()[-30:])
    fact("mount", box.run("python3", "-c", "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))").stdout.decode())
    fact("disk", int(box.run("sh", "-c", "head -c 9000000 /dev/zero > big; wc -c < big; rm big").stdout))
    fact("memory", box.run("python3", "-c", "bytearray(300 << 20)").stderr.decode().split()[-1])
    done = box.run("python3", "-c", bomb, timeout=0.5)
    for _ in range(40):  # the dead wait for init, which has no precedence without root
        left = box.run("python3", "-c", COUNT).stdout.decode()
        if left == "2\\n":
            break
        time.sleep(0.05)
    fact("bomb", [done.timed_out, left])
    box.exec("sleep", "60")  # beside another command, each has a supervisor process of the same uid
    killer = box.run("bash", "-c", "kill -9 $PPID; sleep 60", timeout=5)
    for _ in range(100):  # everything was killed, and dies as soon as it gets a turn
        left = box.run("ps", "-eo", "args=").stdout.decode().count("sleep 60")
        if not left:
            break
        time.sleep(0.05)
    fact("killer", [killer.signal, left])
    box.write("c", b"out")
    fact("files", [box.read("a/b").decode(), box.read("c").decode(), box.run("cat", "c").stdout.decode()])
    try:
        box.run("id", user="root")
    except Exception as error:
        fact("root", type(error).__name__)
    fact("listed", [record.id == box.id for record in list_sandboxes()])
ask = "import socket\\nfor name in ('a.example.org', 'b.org'):\\n  try: print(socket.gethostbyname(name))\\n  except OSError: print('no')"
with Sandbox.create(memory="128Mi", disk="4Mi", network=Egress.allow("a.example.org")) as box:
    fact("egress", [box.run("python3", "-c", ask).stdout.decode(), [(entry.host, entry.port) for entry in box.blocked]])
with Sandbox.create(memory="128Mi", disk="4Mi", network=Egress.open()) as box:
    box.run("python3", "-c", "import socket; socket.create_connection(('10.0.0.1', 99), timeout=2).recv(1)")
    fact("open egress", [(entry.host, entry.port) for entry in box.blocked])
fact("ready", probe().ready)
print(json.dumps(facts))
"""


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder that the unprivileged user owns, and can reach."""
    folder = Path("/var/tmp") / f"sandmill-rootless-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, 54321, 54321)
    return folder


def as_nobody(body: str, state: Path, setup: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-c", AS_NOBODY.replace("os.setgroups", setup + "os.setgroups", 1) + body],
            env=os.environ | {"SANDMILL_STATE": str(state), "HOME": str(state)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        left = [str(path) for path in state.glob("owners/*")]
        subprocess.run(["rm", "-rf", str(state)], check=True)
        assert left == []


def test_rootless_sandboxes_isolate_and_say_what_they_lack(state: Path) -> None:
    done = as_nobody(BODY, state)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    sentence = "without root, sandboxes have no cpu limit, a memory limit only per process, and no in-sandbox root user"
    assert facts.pop("lacks") == sentence
    assert done.stderr.count(sentence) == 1
    assert (4 << 20) - (64 << 10) <= facts.pop("disk") <= 4 << 20
    assert facts.pop("network").strip().endswith("Network is unreachable")
    assert facts == {
        "uid": "1000\n",
        "capabilities": "0" * 16,
        "processes": "2\n",
        "host": "0\n",
        "mount": "-1\n",
        "memory": "MemoryError",
        "bomb": [True, "2\n"],
        "killer": [9, 0],
        "files": ["in", "out", "out"],
        "root": "ExecFailed",
        "listed": [True],
        "egress": ["198.18.0.1\nno\n", [["b.org", 53]]],
        "open egress": [["10.0.0.1", 99]],
        "ready": True,
    }


def test_where_isolation_cannot_be_had_nothing_runs(state: Path) -> None:
    """The kernel answers EPERM to unshare, as inside many containers: creation refuses in one sentence; no bare subprocess runs instead."""
    body = """
try:
    Sandbox.create()
except Exception as error:
    print(type(error).__name__, error)
print(probe().ready)
"""
    blocked = (
        "import ctypes, struct; libc = ctypes.CDLL(None); libc.prctl(38, 1, 0, 0, 0);"
        "code = struct.pack('HBBIHBBIHBBIHBBI', 0x20, 0, 0, 0, 0x15, 0, 1, UNSHARE, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7fff0000);"
        "buffer = ctypes.create_string_buffer(code); program = struct.pack('HxxxxxxQ', 4, ctypes.addressof(buffer));"
        "assert libc.prctl(22, 2, program) == 0;"
    ).replace("UNSHARE", "272" if os.uname().machine == "x86_64" else "97")
    done = as_nobody(body, state, setup=blocked)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("IsolationUnavailable this machine cannot isolate processes: namespaces: Operation not permitted")
    assert lines[1] == "False"
