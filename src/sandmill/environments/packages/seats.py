"""Places for sessions of one package. In: its service. Out: sessions, each with a place of its own until it is given back.

A sandbox holds a bounded number of processes: when all places of a worker are taken, another worker of the same package is started.
Where there is no other, as with a server of one's own, the runner waits for a place before an episode begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from sandmill.environments.packages.asked import AskedService, AskedSession
from sandmill.errors import GraderFailed


class Seats:
    """Belongs to one event loop. `each`: sessions that a worker has at once; the first worker is the service's own."""

    def __init__(self, service: AskedService, each: int) -> None:
        self._each = max(1, each)
        self._services = [service]
        self._taken = [0]
        self._waiting: asyncio.Semaphore | None = None

    def turn(self) -> AbstractAsyncContextManager[object]:
        """Held while an episode is played; entering waits where all places are taken and no further worker can be started."""
        if self._services[0].another() is not None:
            return contextlib.nullcontext()
        self._waiting = self._waiting or asyncio.Semaphore(self._each)
        return self._waiting

    async def session(self) -> tuple[AskedSession, Callable[[], None]]:
        """A session and what gives its place back, once. Raises what starting a worker raises."""
        place = next((index for index, taken in enumerate(self._taken) if taken < self._each), None)
        if place is None and (another := self._services[0].another()) is not None:
            place = len(self._services)
            self._services.append(another)
            self._taken.append(0)
        if place is None:
            raise GraderFailed(f"all {self._each} places of the server are taken")
        self._taken[place] += 1
        try:
            worker = await self._services[place].worker()
        except BaseException:
            self._taken[place] -= 1
            raise
        return worker.session(), self._release(place)

    def _release(self, place: int) -> Callable[[], None]:
        left = [True]

        def release() -> None:
            if left:
                left.clear()
                self._taken[place] -= 1

        return release

    async def close(self) -> None:
        """Ends every worker but the first, which is the service's. Idempotent."""
        for service in self._services[1:]:
            await service.close()
