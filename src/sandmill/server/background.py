"""Work on objects while requests go on: one task an object. In: coroutines. Out: nothing is left running, and what broke is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

END_S: Final = 30.0
"""How long work may take to end once it is told to."""


class Background:
    """Tasks by an object's uid. On the event loop only."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._tasks

    def start(self, uid: str, work: Coroutine[Any, Any, None], over: Callable[[BaseException | None], None]) -> None:
        """Instead of what is under way for the object. `over` is called at its end, unless it was stopped, with what it raised."""
        if (before := self._tasks.get(uid)) is not None:
            before.cancel()
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[uid] = task

        def done(task: asyncio.Task[None]) -> None:
            if self._tasks.get(uid) is task:
                del self._tasks[uid]
            if not task.cancelled():
                over(task.exception())

        task.add_done_callback(done)

    async def stop(self, uid: str) -> bool:
        """Ends what is under way for an object; whether anything was."""
        task = self._tasks.get(uid)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task], timeout=END_S)
        return True

    async def close(self) -> None:
        """Ends everything."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=END_S)
