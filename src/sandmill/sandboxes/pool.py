"""Sandboxes made before they are needed. In: a spec and how many to keep ready. Out: a sandbox at once, its files written by one message.

A ready sandbox's lifetime, idle time and cost begin when it is handed out. A sandbox is never handed out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from sandmill.errors import SandboxError
from sandmill.sandboxes.dual import dual, loop
from sandmill.sandboxes.sandbox import Sandbox
from sandmill.sandboxes.spec import SandboxSpec

_MAKING_AT_ONCE: Final = 4
_REFILL_AFTER_S: Final = 0.01
"""The one that was taken runs its first command before a new one competes with it for the processor."""


class Pool:
    """Keeps `size` sandboxes of one spec ready. With size 0 every `take` creates.

    `eager`: replaces each one as it is taken. Otherwise `fill` does, at a time of the caller's choice: a trainer's processors are
    busier while episodes run than between them.
    """

    def __init__(self, spec: SandboxSpec, size: int, *, eager: bool = True) -> None:
        self.spec = spec
        self.size = size
        self._eager = eager
        self._ready: deque[Sandbox] = deque()
        self._makers: set[asyncio.Task[None]] = set()
        self._closed = False
        loop().call_soon_threadsafe(self._refill)

    @property
    def ready(self) -> int:
        """Sandboxes that wait now."""
        return len(self._ready)

    @dual
    async def take(
        self, files: Mapping[str, bytes | str] | None = None, *, name: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Sandbox:
        """A fresh sandbox with `files` in its workdir: a ready one, or a new one when none is. Raises what `Sandbox.create` raises."""
        while self._ready:
            sandbox = self._ready.popleft()
            if self._eager:
                asyncio.get_running_loop().call_later(_REFILL_AFTER_S, self._refill)
            if not sandbox.alive:
                continue
            sandbox.hand_out(name, labels)
            try:
                if files:
                    await sandbox.write_files.aio(files)
            except BaseException:
                await sandbox.stop("its files could not be written")
                raise
            return sandbox
        if self._eager:
            self._refill()
        return await Sandbox.from_spec.aio(self.spec, files=files, name=name, labels=labels)

    @dual
    async def fill(self) -> None:
        """Starts to make what is missing, in the background."""
        self._refill()

    @dual
    async def close(self) -> None:
        """Ends the sandboxes that still wait. Idempotent; those handed out live on."""
        self._closed = True
        for maker in self._makers:
            maker.cancel()
        await asyncio.gather(*self._makers, return_exceptions=True)
        waiting, self._ready = self._ready, deque()
        await asyncio.gather(*(sandbox.stop("its pool was closed") for sandbox in waiting))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close.aio()

    def _refill(self) -> None:
        while not self._closed and len(self._makers) < min(_MAKING_AT_ONCE, self.size - len(self._ready) - len(self._makers)):
            maker = asyncio.get_running_loop().create_task(self._make())
            self._makers.add(maker)
            maker.add_done_callback(self._made)

    def _made(self, maker: asyncio.Task[None]) -> None:
        self._makers.discard(maker)
        if not maker.cancelled() and maker.exception() is None:
            self._refill()

    async def _make(self) -> None:
        """One more. A failure is not kept: the next `take` creates for itself and says what is wrong."""
        with contextlib.suppress(SandboxError):
            sandbox = await Sandbox.from_spec.aio(self.spec)
            sandbox.lifetime.stop("waiting in a pool")
            if self._closed:
                await sandbox.stop("its pool was closed")
            else:
                self._ready.append(sandbox)
