"""Ready sandboxes: fresh, filled at hand-out, aged from hand-out, gone with their pool."""

from __future__ import annotations

import os
import time

import pytest

from sandmill.errors import SandboxCreateFailed, SandboxGone
from sandmill.sandboxes import Pool, Sandbox, SandboxSpec, block_on, list_sandboxes

SPEC = SandboxSpec.of(memory="64Mi", disk="8Mi", idle_timeout=0.4)


def wait_until_ready(pool: Pool, count: int) -> None:
    deadline = time.monotonic() + 10
    while pool.ready < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_ready_sandbox_is_fresh_and_filled() -> None:
    with Pool(SPEC, 2) as pool:
        wait_until_ready(pool, 2)
        taken = [pool.take({"f": f"{number}".encode()}, name=f"n{number}", labels={"k": "v"}) for number in range(6)]
        assert len({box.id for box in taken}) == 6
        assert [box.run("cat", "f").stdout for box in taken] == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert {box.name for box in taken} <= {record.name for record in list_sandboxes()}
        assert [len(box.list()) for box in taken] == [1] * 6
        for box in taken:
            box.terminate()


def test_waiting_in_a_pool_is_not_idling_but_being_handed_out_starts_the_clock() -> None:
    with Pool(SPEC, 1) as pool:
        wait_until_ready(pool, 1)
        time.sleep(0.7)
        box = pool.take()
        assert box.run("true").exit_code == 0
        time.sleep(0.9)
        with pytest.raises(SandboxGone, match="idle"):
            box.run("true")


def test_a_sandbox_that_died_while_waiting_is_not_handed_out() -> None:
    with Pool(SPEC, 1) as pool:
        wait_until_ready(pool, 1)
        block_on(pool._ready[0].stop("by the test"))
        box = pool.take()
        assert box.run("true").exit_code == 0
        box.terminate()


def test_closing_ends_those_that_wait_and_not_those_handed_out() -> None:
    pool = Pool(SPEC, 3)
    box = pool.take()
    pool.close()
    pool.close()
    assert pool.ready == 0
    assert [record.id for record in list_sandboxes() if record.owner_pid == os.getpid()] == [box.id]
    box.terminate()


def test_a_pool_of_nothing_creates_and_says_what_is_wrong() -> None:
    with Pool(SPEC, 0) as pool:
        with pool.take() as box:
            assert isinstance(box, Sandbox)
    with Pool(SandboxSpec.of(workdir="/var/run/x/" + "y" * 300), 2) as impossible:
        with pytest.raises(SandboxCreateFailed, match="workdir"):
            impossible.take()
