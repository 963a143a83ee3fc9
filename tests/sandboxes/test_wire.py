"""What comes from inside a sandbox is checked; a sandbox whose agent lies is ended, and nothing else is touched."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.errors import SandboxGone
from sandmill.sandboxes import Sandbox, block_on
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.backends.native.channel import Channel

NATIVE = Path(__file__).parents[2] / "native"


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_reply_or_malformed(data: bytes) -> None:
    try:
        reply = wire.parse_reply(data)
    except wire.MalformedError:
        return
    assert wire.READY <= reply.op <= wire.STARTED
    if reply.op in (wire.OUTPUT, wire.EXIT):
        assert reply.out_bytes + reply.err_bytes == len(reply.data)


def reply(op: int, id: int, *, status: int = 0, flags: int = 0, out: int = 0, err: int = 0, data: bytes = b"") -> bytes:
    return struct.pack("=2IiI2I4Q", op, id, status, flags, out, err, 0, 0, 0, 0) + data


LIES = {
    "short": b"x",
    "unknown kind": reply(99, 1),
    "nobody asked": reply(wire.EXIT, 77),
    "wrong kind": reply(wire.EXIT, 1),
    "lengths disagree": reply(wire.OUTPUT, 1, out=1000, data=b"x"),
    "huge lengths": reply(wire.EXIT, 1, out=2**32 - 1, err=2**32 - 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_agent_ends_the_conversation(lie: str) -> None:
    async def scenario() -> list[str]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends: list[str] = []
        agent = Agent(partial(Channel, asyncio.get_running_loop(), ours), ends.append, lambda on: None)
        asking = asyncio.ensure_future(agent.ask(wire.PING))
        await asyncio.sleep(0)
        descriptors = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [LIES[lie]], [theirs.fileno()])
        await asyncio.sleep(0.05)
        agent.close(SandboxGone("s", "test"))
        with pytest.raises(SandboxGone):
            await asking
        theirs.close()
        assert len(os.listdir("/proc/self/fd")) <= descriptors  # what it sent along was closed
        return ends

    [why] = block_on(scenario())
    assert why.startswith("its agent broke the protocol")


def test_an_agent_that_fails_after_its_report_says_what_failed() -> None:
    async def scenario() -> tuple[str, list[str]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends: list[str] = []
        agent = Agent(partial(Channel, asyncio.get_running_loop(), ours), ends.append, lambda on: None)
        ready = agent.expect_ready()
        theirs.send(reply(wire.READY, 0))
        theirs.send(reply(wire.READY, 0, status=errno.ENOMEM, flags=wire.NOT_STARTED, data=b"kcore\x1b[2J"))
        theirs.close()
        first, _ = await asyncio.wait_for(ready, 10)
        await asyncio.sleep(0.05)
        agent.close(SandboxGone("s", "test"))
        return first.failure, ends

    _, ends = block_on(scenario())
    assert ends == [r"it could not be closed in: 'kcore\x1b[2J: Cannot allocate memory'"]


FIRST_AND_LATER = """
import asyncio, sys
from sandmill.sandboxes import Sandbox, block_on
async def seen():
    async with await Sandbox.create.aio(memory="128Mi", disk="16Mi") as box:
        return (await box.run.aio("bash", "-c", sys.argv[1])).stdout
async def all_of_them():
    return [await seen() for _ in range(25)]
first, *others = block_on(all_of_them())
assert b"Seccomp:\\t2" in first and b"/proc/keys" in first, first
assert set(others) == {first}, set(others) - {first}
"""


def test_a_sandbox_that_reports_early_is_closed_in_before_its_first_command() -> None:
    """The first of a process closes itself in before it reports, the others after; a command sees no difference, however soon it comes."""
    look = "grep -E 'Cap|Seccomp|NoNewPrivs' /proc/self/status; cut -d' ' -f5- /proc/self/mountinfo; ls /proc/self/fd; ulimit -a"
    subprocess.run([sys.executable, "-c", FIRST_AND_LATER, look], check=True, timeout=60)


def test_the_two_sides_of_the_protocol_agree() -> None:
    """Numbers in protocol.h and wire.py, one by one."""
    header = (NATIVE / "protocol.h").read_text()
    flags = dict(re.findall(r"^\s+(\w+) = (\d+),", header, re.MULTILINE))
    pairs = {name: getattr(wire, name) for name in ("PAYLOAD_IN_FD", "EXEC_CAPTURE", "EXEC_MERGE", "EXEC_TTY", "EXEC_HOME")}
    pairs |= {"OPEN_PARENTS": wire.OPEN_PARENTS, "REMOVE_TREE": wire.REMOVE_TREE, "HURRY": wire.HURRY_ON}
    assert {name: int(flags[name]) for name in pairs} == pairs
    listed = re.search(r"enum \{ (AGENT_READY = 1.*?)\};", header, re.DOTALL)
    assert listed
    names = [name.strip().split(" ")[0].removeprefix("AGENT_") for name in listed[1].split(",")]
    assert {name: getattr(wire, name) for name in names} == {name: number for number, name in enumerate(names, start=1)}
    assert "INLINE_MAX = 48 * 1024" in header
    assert wire.INLINE_MAX == 48 * 1024


@pytest.mark.parametrize("size", [0, 1, wire.INLINE_MAX - 30, wire.INLINE_MAX, wire.INLINE_MAX + 1, 300_000, 5_000_000])
def test_payloads_of_every_size_arrive(size: int) -> None:
    data = random.Random(size).randbytes(size)
    with Sandbox.create(memory="128Mi", disk="16Mi", files={"at-birth": data}) as box:
        box.write("later", data)
        assert box.read("at-birth") == data
        assert box.read("later") == data
        if size <= 1 << 20:
            assert box.run("cat", stdin=data).stdout == data


def test_thousands_of_requests_at_once_do_not_overrun_the_sockets() -> None:
    async def scenario() -> None:
        async with await Sandbox.create.aio(memory="128Mi", disk="16Mi") as box:
            await asyncio.gather(*(box.ping.aio() for _ in range(3000)))
            await asyncio.gather(*(box.write.aio(f"f{number}", b"x" * 40_000) for number in range(200)))
            assert len(await box.list.aio()) == 200

    block_on(scenario())


def test_text_of_any_kind_becomes_bytes_and_filenames_come_back() -> None:
    assert wire.encode("ä") == b"\xc3\xa4"
    assert wire.encode(os.fsdecode(b"\xff\xfe")) == b"\xff\xfe"
    assert wire.encode("half \ud835") == b"half \xed\xa0\xb5"
    with Sandbox.create(memory="64Mi", disk="8Mi") as box:
        assert box.run("echo", "half \ud835", "\udcff").stdout == b"half \xed\xa0\xb5 \xff\n"
