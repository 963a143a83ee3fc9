"""The event loop on which all egress runs, in a thread of its own: what sandboxes send and receive never delays their commands."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

R = TypeVar("R")

_PATIENCE_S: Final = 10.0
_guard = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_places: asyncio.Semaphore | None = None


def egress_loop() -> asyncio.AbstractEventLoop:
    """Started on first use."""
    global _loop
    with _guard:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="sandmill-egress", daemon=True).start()
        return _loop


def all_places() -> asyncio.Semaphore:
    """The connections that all sandboxes of this process may have together: an eighth of its descriptors, of which each takes two.

    On the egress loop.
    """
    global _places
    if _places is None:
        _places = asyncio.Semaphore(max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
    return _places


async def on_egress_loop(work: Coroutine[Any, Any, R]) -> R:
    """Awaits `work`, which runs there, from another loop. Raises TimeoutError when it takes too long."""
    async with asyncio.timeout(_PATIENCE_S):
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, egress_loop()))


def _forget() -> None:
    """A forked child has no such thread."""
    global _loop, _guard, _places
    _loop, _guard, _places = None, threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
