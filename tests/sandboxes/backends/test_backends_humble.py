"""A guest without in-sandbox root, as in a pod that may not have it: terminals and forks all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from sandmill.config.manifest import BackendName
from sandmill.errors import ExecFailed
from sandmill.sandboxes import PIPE, Sandbox, SandboxSpec, block_on
from sandmill.sandboxes.backends.guest.program import guest_program
from sandmill.sandboxes.backends.guest.sandbox import create_guest
from sandmill.sandboxes.backends.seam import Hearing, Usable

PROGRAM = "/home/user/.guest"


class Machine:
    """A native sandbox whose user runs the guest."""

    def __init__(self, box: Sandbox, hearing: Hearing) -> None:
        self.id = box.id
        self._box, self._hearing = box, hearing
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, guest: Sequence[str]) -> None:
        await self._box.write.aio(PROGRAM, guest_program())
        await self._box.run.aio("chmod", "755", PROGRAM)
        process = await self._box.exec.aio(PROGRAM, *guest, stdin=PIPE, text=False, max_output=64 << 20)

        async def hear() -> None:
            async for piece in process.stdout:
                self._hearing.received(bytes(piece))  # type: ignore[arg-type]
            self._hearing.ended("")

        async def feed() -> None:
            while True:
                await process.stdin.write.aio(await self._queue.get())

        self._tasks = [asyncio.ensure_future(hear()), asyncio.ensure_future(feed())]

    def send(self, data: bytes) -> None:
        self._queue.put_nowait(data)

    async def destroy(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._box.terminate.aio()


class Humble:
    """Makes such machines."""

    name = BackendName.KUBERNETES
    text = False
    start_s = 30.0

    def lacks(self, spec: SandboxSpec) -> str | None:
        return None

    def check(self, spec: SandboxSpec) -> None:
        return

    async def create(self, spec: SandboxSpec, guest: Sequence[str], hearing: Hearing) -> Machine:
        box = await Sandbox.create.aio(memory="256Mi", disk="32Mi", idle_timeout="1h", backend="native", server="")
        machine = Machine(box, hearing)
        await machine.start(guest)
        return machine

    async def usable(self) -> Usable:
        return Usable(ok=True, says="")


@pytest.fixture
def box() -> Iterator[Sandbox]:
    made = block_on(create_guest(Humble(), SandboxSpec.of(disk="32Mi", workdir="/home/user/work"), None, None, None))
    yield made
    made.terminate()


def test_it_has_terminals_but_no_root(box: Sandbox) -> None:
    process = box.exec("sh", "-c", "stat -c %U $(tty)", tty=True)
    assert (process.wait(30), process.stdout.read()) == (0, "user\r\n")
    with pytest.raises(ExecFailed, match="no in-sandbox root"):
        box.run("true", user="root")


def test_its_forks_have_what_its_user_wrote(box: Sandbox) -> None:
    box.run("sh", "-c", "mkdir d; echo kept > d/file; chmod 750 d; ln -s d link; echo tmp > /tmp/mine")
    [fork] = box.fork(1)
    with fork:
        look = ("sh", "-c", "stat -c '%a %U' d; cat link/file /tmp/mine")
        assert fork.run(*look).stdout == box.run(*look).stdout == b"750 user\nkept\ntmp\n"
