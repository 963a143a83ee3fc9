"""The E2B protocol: what a fleet is asked for, and what its faults become. Nothing is ever run twice."""

from __future__ import annotations

import asyncio
import time

import pytest
from e2b_fleet import Fleet
from places import SMALL

from sandmill.errors import IsolationUnavailable, SandboxCreateFailed, SandboxGone
from sandmill.sandboxes import Egress, Sandbox, block_on
from sandmill.sandboxes.backends.choice import load
from sandmill.sandboxes.backends.e2b import backend, machine
from sandmill.sandboxes.backends.seam import BackendName, Usable


def create(**options: object) -> Sandbox:
    return Sandbox.create(**SMALL | {"backend": "e2b"} | options)  # type: ignore[arg-type]


def usable() -> Usable:
    async def ask() -> Usable:
        return await load(BackendName.E2B).usable()

    return block_on(ask())


def test_a_fleet_is_asked_for_what_was_asked_for(fleet: Fleet) -> None:
    for options in (
        {},
        {"image": "my-template", "network": Egress.allow("pypi.org", "*.example.org")},
        {"network": Egress.open(), "timeout": "1m"},
    ):
        create(**options).terminate()
    closed, named, opened = fleet.asked
    assert (closed["templateID"], closed["allow_internet_access"], closed["timeout"]) == ("base", False, machine.LEASE_S)
    assert (named["templateID"], named["network"]["allowOut"]) == ("my-template", ["pypi.org", "*.example.org"])
    assert named["network"]["denyOut"] == ["0.0.0.0/0"]
    assert (opened["allow_internet_access"], opened["timeout"]) == (True, 60 + machine.SPARE_S)
    assert fleet.boxes == {}


def test_a_busy_fleet_is_waited_for(fleet: Fleet) -> None:
    fleet.busy = 2
    with create() as box:
        assert box.run("echo", "hi").stdout == b"hi\n"
    assert len(fleet.asked) == 1


def test_a_fleet_that_stays_busy_is_given_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_CREATE_S", 0.5)
    fleet.busy = 1000
    with pytest.raises(SandboxCreateFailed, match="no room"):
        create()


def test_an_input_that_was_refused_is_sent_again_and_run_once(fleet: Fleet) -> None:
    with create() as box:
        fleet.refuse_input = 3
        assert box.run("sh", "-c", "echo once >> log; cat log").stdout == b"once\n"
        assert fleet.refuse_input == 0


def test_a_lost_microvm_is_gone_and_no_command_is_run_again(fleet: Fleet) -> None:
    with create() as box:
        process = box.exec("sh", "-c", "echo begun; sleep 60")
        assert next(iter(process.stdout)) == "begun\n"
        inputs, asked = fleet.inputs, len(fleet.asked)
        (id,) = fleet.boxes
        block_on(fleet.lose(id))
        with pytest.raises(SandboxGone, match="fleet"):
            process.wait(timeout=30)
        with pytest.raises(SandboxGone):
            box.run("true")
        assert (fleet.inputs, len(fleet.asked)) == (inputs, asked)


def test_a_lease_is_renewed_while_its_owner_lives_and_ends_after(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEASE_S", 3)
    monkeypatch.setattr(backend, "LEASE_S", 3)
    monkeypatch.setattr(machine, "_RENEW_S", 0.5)
    box = create()
    time.sleep(4)
    assert box.run("echo", "lives").stdout == b"lives\n"

    async def die() -> None:
        """What is left of an owner after kill -9."""
        for task in box._machine._tasks:  # type: ignore[attr-defined]
            task.cancel()
        await asyncio.sleep(0)

    block_on(die())
    deadline = time.monotonic() + 20
    while fleet.boxes:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    box.terminate()


def test_a_fleet_that_does_not_answer_is_one_sentence(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable().ok
    monkeypatch.setenv("E2B_API_KEY", "e2b_ffffffffffffffff")
    assert not usable().ok
    with pytest.raises(IsolationUnavailable, match=r"refused the key.*set E2B_API_KEY"):
        create()
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    assert not usable().ok
    with pytest.raises(SandboxCreateFailed, match="the E2B fleet made no sandbox"):
        create()
    monkeypatch.delenv("E2B_API_KEY")
    assert usable().fix.startswith("set E2B_API_KEY")


def test_a_guest_that_cannot_run_there_is_a_failed_creation(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_GUEST", "/etc/passwd")  # as good as another architecture's
    with pytest.raises(SandboxCreateFailed, match=r"the guest ended with exit code 12[67]"):
        create()
    assert fleet.boxes == {}
