"""What is true of every backend whose agent is a guest: its limits, what it refuses, and that no guest is believed."""

from __future__ import annotations

import base64
import errno
import struct
import time
from collections.abc import Callable, Sequence

import pytest
from places import Place

from sandmill.config.manifest import BackendName
from sandmill.errors import SandboxCreateFailed, SandboxError, SandboxFileError, SandboxGone, Unsupported
from sandmill.sandboxes import Sandbox, SandboxSpec, block_on
from sandmill.sandboxes.backends.guest import agent, process
from sandmill.sandboxes.backends.guest.sandbox import create_guest
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.seam import Hearing, Usable


def until_gone(box: Sandbox) -> str:
    deadline = time.monotonic() + 20
    while box.gone_reason is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return box.gone_reason


def test_a_lifetime_ends_it(guests: Place) -> None:
    box = guests.create(timeout="1s")
    sleeper = box.exec("sh", "-c", "echo so far; sleep 60")
    assert "lifetime" in until_gone(box)
    assert sleeper.stdout.read() == "so far\n"
    box.terminate()


def test_idleness_ends_it_but_not_under_a_command(guests: Place) -> None:
    box = guests.create(idle_timeout="1s")
    assert box.run("sleep", "1.5").exit_code == 0
    assert "idle" in until_gone(box)
    box.terminate()


def test_what_a_backend_cannot_do_is_refused_with_its_name(guests: Place) -> None:
    with guests.create() as box:
        acts: tuple[Callable[[], object], ...] = (
            box.snapshot_filesystem,
            lambda: box.halt(keep=True),
        )
        for act in acts:
            with pytest.raises(Unsupported, match=rf"^backend {guests.backend} cannot .*; "):
                act()
        assert box.run("echo", "lives").stdout == b"lives\n"
    with pytest.raises(Unsupported, match=rf"^backend {guests.backend} cannot keep"):
        guests.create(continuity="Snapshotted")
    with pytest.raises(Unsupported, match="start a sandbox again"):
        box.start()


def test_what_cannot_be_copied_is_said_and_the_sandbox_goes_on(guests: Place) -> None:
    with guests.create() as box:
        ticking = box.exec("sh", "-c", "while :; do date +%N > tick; sleep 0.02; done")
        box.run("python3", "-c", "import os\nfor _ in range(210): os.mkdir('d'); os.chdir('d')")
        with pytest.raises(SandboxError, match=r"could not be copied: '/workspace/d/d.*Too many levels"):
            box.fork(2)
        box.run("rm", "-rf", "d")
        assert box.run("sh", "-c", "rm tick; until [ -s tick ]; do sleep 0.05; done", timeout=20).exit_code == 0
        ticking.kill()
        box.fork(1)[0].terminate()


def test_a_guests_folders_are_not_files(guests: Place) -> None:
    with guests.create() as box:
        box.write("f", b"")
        with pytest.raises(SandboxFileError) as error:
            box.list("f")
        assert error.value.errno == errno.ENOTDIR


class Liar:
    """A backend whose guest says whatever a test wants: first `first`, then `then` to each request."""

    name = BackendName.NATIVE
    start_s = 5.0

    def __init__(self, first: bytes, then: Callable[[bytes], bytes] = lambda request: b"", *, text: bool = False) -> None:
        self.text = text
        self.id = "liar"
        self.destroyed = 0
        self._first, self._then = first, then

    def lacks(self, spec: SandboxSpec) -> str | None:
        return None

    def check(self, spec: SandboxSpec) -> None:
        return

    async def create(self, spec: SandboxSpec, guest: Sequence[str], hearing: Hearing) -> Liar:
        self._hearing = hearing
        hearing.received(self._first)
        return self

    def send(self, data: bytes) -> None:
        self._hearing.received(self._then(data))

    async def destroy(self) -> None:
        self.destroyed += 1

    async def usable(self) -> Usable:
        return Usable(ok=True, says="")


def reply(op: int, id: int = 0, status: int = 0, data: bytes = b"", *, out: int = 0, flags: int = 0) -> bytes:
    body = struct.pack("=2IiI2I4Q", op, id, status, flags, out, 0, 0, 0, 0, 0) + data
    return struct.pack("=I", len(body)) + body


READY = reply(wire.READY, data=b"1000 1000 root")


def make(liar: Liar) -> Sandbox:
    return block_on(create_guest(liar, SandboxSpec.of(), None, None, None))


@pytest.mark.parametrize(
    "first",
    [b"\xff" * 64, struct.pack("=I", 3) + b"abc", reply(wire.READY, data=b"root"), reply(wire.READY, data=b"a b"), reply(wire.EXIT, id=9)],
    ids=["a huge length", "a short frame", "one number", "no numbers", "an answer to nothing"],
)
def test_a_guest_that_begins_with_nonsense_is_ended(first: bytes) -> None:
    liar = Liar(first)
    with pytest.raises(SandboxCreateFailed):
        make(liar)
    assert liar.destroyed == 1


def test_a_guest_that_speaks_no_base64_is_ended() -> None:
    liar = Liar(b"abc\n", text=True)
    with pytest.raises(SandboxCreateFailed):
        make(liar)
    fine = Liar(base64.b64encode(READY[4:]) + b"\n" + b"\xff\xfe" * 3_000_000, text=True)
    assert "protocol" in until_gone(make(fine))


def test_a_guest_that_cannot_make_the_workdir_says_so() -> None:
    with pytest.raises(SandboxCreateFailed, match="/workspace: Read-only file system"):
        make(Liar(reply(wire.READY, status=errno.EROFS, data=b"/workspace")))


@pytest.mark.parametrize(
    "answer",
    [
        lambda id: reply(wire.OUTPUT, id, data=b"x" * 900, out=900),
        lambda id: reply(wire.OUTPUT, id, data=b"x" * 20, out=10),
        lambda id: reply(wire.EXIT, id),
        lambda id: reply(99, id),
    ],
    ids=["more than was asked for", "lengths that disagree", "the wrong kind", "no kind"],
)
def test_a_guest_that_lies_about_a_file_is_ended(answer: Callable[[int], bytes]) -> None:
    liar = Liar(READY, lambda request: answer(struct.unpack_from("=2I", request, 4)[1]))
    box = make(liar)
    with pytest.raises(SandboxGone, match="protocol"):
        box.read("f", max_bytes=100)
    assert "protocol" in until_gone(box)


def test_a_listing_that_is_cut_ends_it() -> None:
    def answer(request: bytes) -> bytes:
        id = struct.unpack_from("=2I", request, 4)[1]
        listing = struct.pack("=2IQ", 0o100644, 200, 1) + b"short"
        return reply(wire.OUTPUT, id, data=listing, out=len(listing)) + reply(wire.OPEN, id, flags=1)

    with pytest.raises(SandboxGone, match="protocol"):
        make(Liar(READY, answer)).list()


def test_a_guest_that_writes_more_than_was_asked_for_is_ended() -> None:
    liar = Liar(READY, lambda request: reply(wire.OUTPUT, struct.unpack_from("=2I", request, 4)[1], data=b"x" * 3000, out=3000))
    with pytest.raises(SandboxGone, match="protocol"):
        make(liar).run("true", max_output=1000)


@pytest.mark.parametrize(
    "answer",
    [
        lambda id: struct.pack("=I2IiI2I4Q", 61, wire.OUTPUT, id, 0, 0, 0, 5, 0, 0, 0, 0) + b"error",
        lambda id: reply(wire.RESIZE, id),
        lambda id: reply(wire.PART, id),
        lambda id: reply(wire.OPEN, id),
    ],
    ids=["standard error", "a size", "a part", "a file"],
)
def test_a_guest_that_says_what_no_terminal_says_is_ended(answer: Callable[[int], bytes]) -> None:
    def then(request: bytes) -> bytes:
        op, id = struct.unpack_from("=2I", request, 4)
        return reply(wire.STARTED, id) + answer(id) if op == wire.EXEC else b""

    box = make(Liar(READY, then))
    with pytest.raises(SandboxGone, match="protocol"):
        box.exec("sh", tty=True).wait(10)
    assert "protocol" in until_gone(box)


def test_what_a_terminal_shows_is_bounded_whatever_a_guest_sends() -> None:
    def then(request: bytes) -> bytes:
        op, id = struct.unpack_from("=2I", request, 4)
        flood = reply(wire.OUTPUT, id, data=b"x" * 40_000, out=40_000) * 50
        return {wire.EXEC: reply(wire.STARTED, id) + flood, wire.KILL_TREE: reply(wire.EXIT, id, status=9)}.get(op, b"")

    process = make(Liar(READY, then)).exec("sh", tty=True, max_output=1000, text=False)
    process.resize(24, 80)
    process.kill()
    assert process.truncated
    assert process.stdout.read() == b"x" * 1000


def copying(answer: Callable[[int], bytes]) -> Liar:
    """A guest that takes part in everything, and answers so when its files are asked for."""

    def then(request: bytes) -> bytes:
        op, id, flags = struct.unpack_from("=3I", request, 4)
        if op == wire.EXEC and flags & wire.EXEC_COPY:
            return reply(wire.STARTED, id) + answer(id)
        return {wire.KILL_TREE: reply(wire.EXIT, id, status=9)}.get(op, reply(op, id))

    return Liar(READY, then)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda id: reply(wire.OUTPUT, id, data=b"x" * 40_000, out=40_000) * 120, "more than 4194304 bytes"),
        (lambda id: reply(wire.EXIT, id, status=5 << 8), "Input/output error"),
        (lambda id: reply(wire.EXIT, id, status=9), "it was killed"),
        (lambda id: reply(wire.EXIT, id, status=errno.EPERM, flags=wire.NOT_STARTED), "could not be started"),
    ],
    ids=["too much", "an error", "an end", "none"],
)
def test_files_that_do_not_come_whole_make_no_fork(answer: Callable[[int], bytes], why: str) -> None:
    liar = copying(answer)
    box = block_on(create_guest(liar, SandboxSpec.of(disk="1Mi"), None, None, None))
    with pytest.raises(SandboxError, match=why):
        box.fork(1)
    assert box.alive
    box.terminate()
    assert liar.destroyed == 1


def test_a_fork_whose_files_do_not_go_in_is_ended() -> None:
    ends = iter([0, 28 << 8])
    liar = copying(lambda id: reply(wire.EXIT, id, status=next(ends)))
    box = make(liar)
    with pytest.raises(SandboxCreateFailed, match="No space left"):
        box.fork(1)
    assert box.alive
    assert liar.destroyed == 1


def test_a_guest_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "ANSWER_S", 0.3)
    monkeypatch.setattr(process, "START_S", 0.3)
    monkeypatch.setattr("sandmill.sandboxes.commanding._KILL_PATIENCE_S", 0.3)
    acts: tuple[Callable[[Sandbox], object], ...] = (
        lambda box: box.ping(),
        lambda box: box.read("f"),
        lambda box: box.write("f", b""),
        lambda box: box.exec("true"),
        lambda box: box.run("true", timeout=0.1),
    )
    for act in acts:
        liar = Liar(READY)
        with pytest.raises(SandboxGone):
            act(make(liar))
        assert liar.destroyed == 1


def test_a_command_that_survives_its_kill_ends_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandmill.sandboxes.process._KILL_PATIENCE_S", 0.3)

    def answer(request: bytes) -> bytes:
        op, id = struct.unpack_from("=2I", request, 4)
        return reply(wire.STARTED, id) if op == wire.EXEC else b""

    running = make(Liar(READY, answer)).exec("sleep", "60", timeout=0.1)
    with pytest.raises(SandboxGone, match="could not be killed"):
        running.wait()


def test_a_machine_that_cannot_be_removed_is_not_waited_for_for_ever() -> None:
    class Stubborn(Liar):
        async def destroy(self) -> None:
            raise SandboxError("the fleet does not answer")

    box = make(Stubborn(READY))
    box.terminate()
    assert box.gone_reason == "terminated"
