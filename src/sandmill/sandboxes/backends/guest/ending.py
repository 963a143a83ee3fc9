"""What a machine's end has to take care of. In: its tasks; descriptors that keep it alive. Out: none of them left."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Final

_TRIES: Final = 5
_PATIENCE_S: Final = 1.0
_held: set[int] = set()


async def end_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels them until they are over; a foreign library may lose a cancellation on its way."""
    pending = set(tasks)
    for _ in range(_TRIES):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_PATIENCE_S)


def hold(descriptor: int) -> None:
    """Its closing, at this process's death, ends a machine: a forked child must not keep it open."""
    _held.add(descriptor)


def let_go(descriptor: int) -> None:
    """It is about to be closed. Idempotent."""
    _held.discard(descriptor)


def _forget() -> None:
    """In a forked child: each is replaced, not closed, because the objects that own it may close the number later."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.dup2(null, descriptor, inheritable=False)
    _held.clear()
    os.close(null)


os.register_at_fork(after_in_child=_forget)
