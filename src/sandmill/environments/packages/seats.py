"""Places for sessions of one package. In: its service. Out: sessions, each with a place of its own until it is given back.

A sandbox holds a bounded number of processes: when all places of a worker are taken, another worker of the same package is started.
"""

from __future__ import annotations

from collections.abc import Callable

from sandmill.environments.packages.loaded import PackageSession
from sandmill.environments.packages.service import PackageService


class Seats:
    """Belongs to one event loop. `each`: sessions that a worker has at once; the first worker is the service's own."""

    def __init__(self, service: PackageService, each: int) -> None:
        self._each = max(1, each)
        self._services = [service]
        self._taken = [0]

    async def session(self) -> tuple[PackageSession, Callable[[], None]]:
        """A session and what gives its place back, once. Raises what starting a worker raises."""
        place = next((index for index, taken in enumerate(self._taken) if taken < self._each), None)
        if place is None:
            place = len(self._services)
            self._services.append(PackageService(self._services[0].launch))
            self._taken.append(0)
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
