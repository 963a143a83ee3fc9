"""A guest's files on their way to another guest (native/copying.c). In: a live guest; later, fresh ones. Out: a file with a stream that
nobody here looks into, since whoever ran in the guest chose what is in it; the same files in the fresh ones.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from typing import BinaryIO, Final

from sandmill.errors import SandboxError
from sandmill.sandboxes.backends.guest.process import GuestProcess
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.backends.native.state import state_root
from sandmill.sandboxes.streams import Output

COPY_S: Final = 600.0
_PIECE: Final = 1 << 18
_LONGEST_PATH: Final = 4096


class Spool(Output):
    """Output that goes to a file without a name, `limit` bytes at most."""

    def __init__(self, limit: int) -> None:
        super().__init__(asyncio.get_running_loop(), -1, limit, False)
        state_root().mkdir(mode=0o711, parents=True, exist_ok=True)
        self.file: BinaryIO = tempfile.TemporaryFile(dir=state_root())  # noqa: SIM115 - it outlives this: forks are made from it
        self.trouble = ""
        """Why it is not whole."""
        self.stop: Callable[[], None] = lambda: None
        """Ends whoever writes."""
        self._left = limit

    def take(self, data: bytes) -> None:
        """A piece has come."""
        self._left -= len(data)
        if self._left < 0:
            self.trouble = f"they are more than {self._limit} bytes"
        if not self.trouble:
            try:
                self.file.write(data)
                self.file.flush()
            except OSError as error:
                self.trouble = f"this machine's disk does not take them: {error.strerror}"
        if self.trouble:
            self.stop()


class Copying(GuestProcess):
    """The guest's own process that moves files: out to `spool`, or in from standard input."""

    def __init__(self, agent: Agent, give_up: Callable[[str], None], spool: Spool | None) -> None:
        super().__init__(agent, give_up, with_input=spool is None, terminal=False, text=False, max_output=_LONGEST_PATH, timeout_s=COPY_S)
        if spool is not None:
            spool.stop = self._must_end
            self.stdout = spool.fed()

    async def feed_from(self, file: BinaryIO) -> None:
        """Everything in `file`. May be done for several at once."""
        at = 0
        while data := os.pread(file.fileno(), _PIECE, at):
            try:
                await self.stdin.write.aio(data)
            except BrokenPipeError:
                return  # its end says why
            at += len(data)
        self.stdin.shut()

    async def finish(self) -> None:
        """Waits for its end. Raises SandboxError when not all was moved."""
        try:
            code = await self.wait.aio()
        except asyncio.CancelledError:
            self._must_end()
            raise
        if not code:
            return
        path = bytes(await self.stderr.read_bytes.aio())[:_LONGEST_PATH].decode("utf-8", "surrogateescape")
        reason = (
            f"they took longer than {COPY_S:g} s" if self.timed_out else f"{path!a}: {os.strerror(code)}" if code > 0 else "it was killed"
        )
        raise SandboxError(reason)
