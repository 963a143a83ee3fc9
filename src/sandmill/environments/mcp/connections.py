"""Tool servers that several conversations use. In: servers by name. Out: a connection: one's own, or the one that all share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from sandmill.environments.mcp.server import Connection, McpServer


class Connections:
    """Servers by name, and the connections to those that are shared. Belongs to the event loop that it is first used on."""

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self.servers = servers
        self._shared: dict[str, asyncio.Task[Connection]] = {}

    async def connection(self, name: str) -> tuple[Connection, bool]:
        """A connection to the server, and whether it is the caller's alone. Raises EnvironmentFailed."""
        section = self.servers[name].section
        if not section.shared and section.url is None:
            return await self.servers[name].start(), True
        known = self._shared.get(name)
        if known is None or (known.done() and (known.exception() is not None or not known.result().alive)):
            ended, known = known, asyncio.create_task(self.servers[name].start())
            self._shared[name] = known  # before anything is awaited: nobody else starts one too
            if ended is not None and ended.exception() is None:
                await ended.result().close()
        return await asyncio.shield(known), False

    async def close(self) -> None:
        """Ends the servers that are shared. Idempotent."""
        tasks, self._shared = list(self._shared.values()), {}
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(made, Connection):
                await made.close()


class Held:
    """The connections of one conversation, each made when it is first needed."""

    def __init__(self, servers: Connections) -> None:
        self._servers = servers
        self._connections: dict[str, Connection] = {}
        self._mine: list[Connection] = []
        self._starting = asyncio.Lock()

    @property
    def names(self) -> frozenset[str]:
        """Of the servers there are."""
        return frozenset(self._servers.servers)

    async def connection(self, name: str) -> Connection:
        """To the server of this name, which is there. Raises EnvironmentFailed."""
        async with self._starting:
            if name not in self._connections:
                self._connections[name], alone = await self._servers.connection(name)
                if alone:
                    self._mine.append(self._connections[name])
            return self._connections[name]

    async def close(self) -> None:
        """Ends those that are nobody else's; what is asked later is asked of new ones. Idempotent."""
        mine, self._mine = self._mine, []
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in mine))


__all__ = ["Connections", "Held"]
