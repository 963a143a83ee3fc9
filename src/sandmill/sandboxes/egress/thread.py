"""The event loop on which all egress runs, in a thread of its own: what sandboxes send and receive never delays their commands."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

_guard = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def egress_loop() -> asyncio.AbstractEventLoop:
    """Started on first use."""
    global _loop
    with _guard:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="sandmill-egress", daemon=True).start()
        return _loop


async def on_egress_loop(work: Coroutine[Any, Any, R]) -> R:
    """Awaits `work`, which runs there, from another loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, egress_loop()))


def _forget() -> None:
    """A forked child has no such thread."""
    global _loop, _guard
    _loop, _guard = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
