"""Network namespaces pass from an ended sandbox to the next only when nothing ever happened in them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sandmill.sandboxes import Sandbox
from sandmill.sandboxes.backends.native import node as nodes

COUNTERS = "cat /proc/net/dev /proc/net/snmp /proc/net/netstat /proc/net/snmp6; head -1 /proc/net/sockstat"
TALK = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).sendall(b"x")
server.accept()[0].recv(1)
"""
TRACES = {
    "packets on loopback": TALK,
    "a refused connection": "import socket as s\ns.socket().connect_ex(('127.0.0.1', 9))",
    "an unreachable address": "import socket as s\ns.socket(s.AF_INET, s.SOCK_DGRAM).connect_ex(('8.8.8.8', 9))",
}


def used(program: str | None) -> tuple[str, str]:
    """A sandbox that ran `program`: its namespace and its counters as they were before."""
    with Sandbox.create(memory="128Mi", disk="16Mi") as box:
        before = box.run("sh", "-c", COUNTERS).stdout.decode()
        namespace = box.run("readlink", "/proc/self/ns/net").stdout.decode()
        if program is not None:
            box.run("python3", "-c", program)
    return namespace, before


def test_one_that_nobody_used_serves_the_next() -> None:
    first, clean = used(None)
    assert used(None) == (first, clean)


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES.keys())
def test_one_with_a_trace_of_the_last_sandbox_does_not(trace: str) -> None:
    first, clean = used(trace)
    second, counters = used(None)
    assert second != first
    assert counters == clean


def test_two_that_live_at_once_have_two() -> None:
    with Sandbox.create(memory="128Mi", disk="16Mi") as one, Sandbox.create(memory="128Mi", disk="16Mi") as two:
        names = {box.run("readlink", "/proc/self/ns/net").stdout for box in (one, two)}
        assert len(names) == 2
        assert os.readlink("/proc/self/ns/net").encode() not in {name.strip() for name in names}


def test_those_kept_for_the_next_do_not_stay() -> None:
    used(None)
    node = nodes._node
    assert node is not None
    held = Path(f"/proc/{node._process.pid}/fd")
    deadline = time.monotonic() + 5
    while len({os.readlink(link) for link in held.iterdir() if os.readlink(link).startswith("net:")}) > 1:  # one: its own
        assert time.monotonic() < deadline
        time.sleep(0.1)
