"""A trainer as the server sees it. In: a job's folder. Out: its events, its end; and a way to stop it with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from sandmill.rollouts.events import Event
from sandmill.server.trainer import RunEnded, RunFailed

LOG: Final = "trainer.log"
_GRACE_S: Final = 10.0
_LONGEST_LINE: Final = 64 << 20
_LONGEST_COMPLAINT: Final = 2000
_NOT_ITS_BUSINESS: Final = ("SANDMILL_API_URL", "SANDMILL_API_KEY", "SANDMILL_BACKEND", "NODUS_API_URL", "NODUS_API_KEY")
_HERE: Final = str(Path(__file__).parents[2])
_lines: Final = msgspec.json.Decoder(Event | RunEnded | RunFailed)


class TrainerProcess:
    """One start of a trainer."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._killer: asyncio.TimerHandle | None = None
        self.last: Event | RunEnded | RunFailed | None = None
        """What it said last."""
        self.asked = False
        """Whether it was asked to stop."""

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, folder: Path, attempt: int) -> AsyncIterator[TrainerProcess]:
        """A trainer for a block, at whose end it is dead with everything that it started."""
        words = (sys.executable, "-P", "-m", "sandmill.server.trainer", str(folder), str(os.getpid()), str(attempt))
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_ITS_BUSINESS}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_HERE, environment.get("PYTHONPATH"))))  # the server's own sandmill
        with (folder / LOG).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
                limit=_LONGEST_LINE,
            )
        live = cls(process, folder)
        try:
            yield live
        finally:
            if process.returncode is None:
                live.stop(at_once=True)
            await live._reap()

    async def events(self) -> AsyncIterator[Event]:
        """What it tells, until it closes its output."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with contextlib.suppress(msgspec.MsgspecError):  # a library of the trainer that prints
                self.last = _lines.decode(line)
                if not isinstance(self.last, RunEnded | RunFailed):
                    yield self.last

    async def ended(self) -> int:
        """Its exit code."""
        return await self._process.wait()

    def stop(self, *, at_once: bool) -> None:
        """After the step in hand, everything saved; or at once, and soon after by force."""
        self.asked = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT if at_once else signal.SIGTERM)
        if at_once and self._killer is None:
            self._killer = asyncio.get_running_loop().call_later(_GRACE_S, self._kill)

    def complaint(self) -> str:
        """The last thing it wrote to stderr."""
        with contextlib.suppress(OSError):
            with (self._folder / LOG).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LONGEST_COMPLAINT))
                lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            if lines:
                return lines[-1][:500]
        return "it said nothing"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _reap(self) -> None:
        waiting = asyncio.ensure_future(self._process.wait())
        while not waiting.done():
            try:
                await asyncio.wait([waiting], timeout=_GRACE_S + 1)
            except asyncio.CancelledError:
                self._kill()
            if not waiting.done():
                self._kill()
        if self._killer is not None:
            self._killer.cancel()
        self._kill()  # whatever of its group outlived it
