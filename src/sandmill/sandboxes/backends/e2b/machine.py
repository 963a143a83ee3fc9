"""One microVM of an E2B fleet. In: bytes for the guest, which runs as a background command. Out: what it writes; the VM's end.

The VM lives on a lease that is renewed while its owner lives, so an owner that is killed leaves nothing for longer than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Sequence
from typing import Any, Final

import httpx
from e2b import AsyncCommandHandle, AsyncSandbox
from e2b.exceptions import (
    AuthenticationException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    ServiceBusyException,
)
from e2b.sandbox.commands.command_handle import CommandExitException

from sandmill.errors import SandboxCreateFailed, SandboxError
from sandmill.sandboxes.backends.guest.ending import end_tasks
from sandmill.sandboxes.backends.guest.program import guest_program
from sandmill.sandboxes.backends.seam import Hearing

FAILURES: Final = (SandboxException, AuthenticationException, ServiceBusyException, httpx.HTTPError, OSError, ValueError)
"""What the package raises for anything that goes wrong outside."""
LEASE_S: Final = 300
SPARE_S: Final = 30
"""A sandbox whose time is over is ended from here, with the reason; the fleet does so a little later."""
_RENEW_S: Final = LEASE_S / 3
_BUSY_FOR_S: Final = 60.0
_PAUSE_S: Final = 0.2
_REQUEST_S: Final = 30.0
_MOST_AT_ONCE: Final = 1 << 20
_PATH: Final = "/tmp/.sandmill-guest"


class E2BMachine:
    """A microVM and the guest in it."""

    def __init__(self, box: AsyncSandbox, hearing: Hearing, timeout_s: float) -> None:
        self._box = box
        self._hearing = hearing
        self._ends_at = asyncio.get_running_loop().time() + timeout_s + SPARE_S
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._handle: AsyncCommandHandle[Any] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._errors = ""

    @property
    def id(self) -> str:
        """The fleet's."""
        return self._box.sandbox_id

    async def start(self, guest: Sequence[str]) -> None:
        """Puts the guest there and starts it. Raises SandboxCreateFailed."""
        try:
            await self._box.files.write(_PATH, guest_program(), user="root", use_octet_stream=True, request_timeout=_REQUEST_S)
            self._handle = await self._box.commands.run(
                f"chmod 755 {_PATH} && exec {shlex.join((_PATH, *guest))}",
                background=True,
                user="root",
                stdin=True,
                timeout=0,
                on_stdout=lambda text: self._hearing.received(text.encode()),
                on_stderr=self._note,
                retain_output=False,
            )
        except FAILURES as error:
            raise SandboxCreateFailed(f"the E2B sandbox {self.id} took no guest: {said(error)}") from error
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._feed(self._handle), self._watch(self._handle), self._renew())]

    def send(self, data: bytes) -> None:
        """For the guest's standard input."""
        self._queue.put_nowait(data)

    async def destroy(self) -> None:
        """Kills the VM. Raises SandboxError when the fleet does not answer; then its lease ends it."""
        await end_tasks(self._tasks)
        try:
            await self._box.kill(request_timeout=_REQUEST_S)
        except SandboxNotFoundException:
            return
        except FAILURES as error:
            raise SandboxError(f"{said(error)}; it ends by itself within {LEASE_S} s") from error

    async def _feed(self, handle: AsyncCommandHandle[Any]) -> None:
        """In order, one request at a time. What may have arrived is never sent again: the machine ends instead."""
        while True:
            data = await self._queue.get()
            while not self._queue.empty() and len(data) < _MOST_AT_ONCE:
                data += self._queue.get_nowait()
            try:
                await self._send(handle, data)
            except FAILURES as error:
                self._hearing.ended(f"its fleet broke off: {said(error)}")
                return

    async def _send(self, handle: AsyncCommandHandle[Any], data: bytes) -> None:
        """A fleet that is busy has not taken the request: then it is made again, for a while."""
        deadline, pause = asyncio.get_running_loop().time() + _BUSY_FOR_S, _PAUSE_S
        while True:
            try:
                await handle.send_stdin(data, request_timeout=_REQUEST_S)
            except RateLimitException:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(pause)
                pause = min(5.0, 2 * pause)
            else:
                return

    async def _watch(self, handle: AsyncCommandHandle[Any]) -> None:
        why = "the guest ended"
        try:
            await handle.wait()
        except CommandExitException as error:
            why = f"the guest ended with exit code {error.exit_code}"
        except (SandboxNotFoundException, SandboxNotRunningException):
            why = "its fleet no longer has it"
        except FAILURES as error:
            why = f"its fleet broke off: {said(error)}"
        self._hearing.ended(f"{why}: {self._errors.strip()[-300:]!a}" if self._errors.strip() else why)

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while loop.time() - renewed < LEASE_S:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(*FAILURES):
                await self._box.set_timeout(min(LEASE_S, max(1, round(self._ends_at - loop.time()))), request_timeout=_REQUEST_S)
                renewed = loop.time()
        self._hearing.ended(f"its fleet has not answered for {LEASE_S} s")

    def _note(self, text: str) -> None:
        self._errors = (self._errors + text)[-2000:]


def said(error: BaseException) -> str:
    """A foreign message, fit for a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return ascii(text[:300])[1:-1]
