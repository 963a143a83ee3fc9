"""A package that answers as long as anyone asks. In: how to start it. Out: a live worker, started when first asked and when it broke."""

from __future__ import annotations

import asyncio

from sandmill.environments.packages.loaded import Launch, LoadedPackage
from sandmill.sandboxes.dual import hop


class PackageService:
    """At most one worker of a package at a time. May be used from any loop."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._live: LoadedPackage | None = None
        self._starting: asyncio.Lock | None = None
        self.starts = 0

    async def worker(self) -> LoadedPackage:
        """The live worker. Raises what LoadedPackage.start raises."""
        live = self._live
        return live if live is not None and live.alive else await hop(self._started())

    def another(self) -> PackageService:
        """A further one of the same package, not started."""
        return PackageService(self.launch)

    async def close(self) -> None:
        """Ends the worker, and what its graders may ask. Idempotent; asking again starts another."""
        await hop(self._close())
        await hop(self.launch.access.close())

    async def _started(self) -> LoadedPackage:
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._live is None or not self._live.alive:
                await self._close()
                self._live = await LoadedPackage.start(self.launch)
                self.starts += 1
            return self._live

    async def _close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            await live.close()
