"""Sandboxes live and end the same at every backend, and nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from places import Maker, Place

from sandmill.errors import ConfigError, SandboxFileError, SandboxGone
from sandmill.sandboxes import Sandbox, block_on


def test_after_its_end_everything_says_so(make: Maker, where: Place) -> None:
    box = make()
    sleeper = box.exec("sleep", "60")
    box.terminate()
    box.terminate()
    with pytest.raises(SandboxGone):
        sleeper.wait(timeout=20)
    assert not box.alive
    assert box.gone_reason == "terminated"
    for act in (
        lambda: box.run("true"),
        lambda: box.exec("true"),
        lambda: box.read("x"),
        lambda: box.write("x", b""),
        box.ping,
        box.kill_processes,
    ):
        with pytest.raises(SandboxGone, match="terminated"):
            act()
    assert where.left() == []


def test_sandboxes_do_not_share(make: Maker) -> None:
    one, two = make(), make()
    one.write("/tmp/mine", b"1")
    one.run("sh", "-c", "sleep 4720 &")
    with pytest.raises(SandboxFileError):
        two.read("/tmp/mine")
    assert b"4720" not in two.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout


def test_a_creation_that_fails_leaves_nothing(make: Maker, where: Place) -> None:
    with pytest.raises((SandboxFileError, ConfigError, OSError)):
        make(files={"a/b": b"", "a/b/c": b""})
    assert where.left() == []


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.03])
def test_a_creation_that_is_cancelled_leaves_nothing(where: Place, after_s: float) -> None:
    async def scenario() -> None:
        making = asyncio.ensure_future(Sandbox.create.aio(memory="256Mi", disk="32Mi", backend=where.backend))
        await asyncio.sleep(after_s)
        making.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await making).terminate.aio()  # it was there already

    block_on(scenario())
    deadline = time.monotonic() + 20
    while left := where.left():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_several_at_once(where: Place) -> None:
    async def one(number: int) -> bytes:
        async with await Sandbox.create.aio(memory="256Mi", disk="32Mi", backend=where.backend, files={"n": b"%d" % number}) as box:
            return (await box.run.aio("cat", "n")).stdout

    async def all_of_them() -> list[bytes]:
        return list(await asyncio.gather(*(one(number) for number in range(6))))

    assert block_on(all_of_them()) == [b"%d" % number for number in range(6)]
    assert where.left() == []


def test_processes_are_limited(make: Maker) -> None:
    box = make()
    done = box.run("sh", "-c", "i=0; while [ $i -lt 300 ]; do sleep 60 & i=$((i+1)); done", timeout=60)
    assert done.exit_code not in (0, None)
    box.kill_processes()
    assert box.run("echo", "lives").stdout == b"lives\n"
