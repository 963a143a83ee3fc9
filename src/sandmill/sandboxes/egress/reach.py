"""From a name or an address to a connection. In: what the policy let through. Out: a connected socket, to an address that was checked.

A name is resolved once, and the very addresses that were checked are connected to: a name that changes its mind (DNS rebinding) or
points at this machine leads nowhere.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

from sandmill.sandboxes.egress.addresses import Address, permitted
from sandmill.sandboxes.egress.blocked import Refused
from sandmill.sandboxes.egress.outside import Outside

_LOOKUP_S: Final = 10.0
_CONNECT_S: Final = 10.0
_MOST_LOOKUPS: Final = 4
_MOST_TRIED: Final = 4


class UnreachableError(Refused):
    """Nothing forbids it, but it cannot be had."""


class Reach:
    """One sandbox's share of the way out. On the egress loop."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._lookups = asyncio.Semaphore(_MOST_LOOKUPS)

    async def addresses(self, name: str, port: int) -> list[Address]:
        """The addresses of `name` that may be connected to. Raises Refused when it has only others, UnreachableError when it has none."""
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = await self._lookup(name)
        except TimeoutError:
            raise UnreachableError(name, port, "its name could not be resolved in time") from None
        except OSError:
            raise UnreachableError(name, port, "its name could not be resolved") from None
        good, reason = permitted(found)
        if not good:
            raise Refused(name, port, reason) if reason else UnreachableError(name, port, "its name has no address")
        return good

    async def name(self, name: str, port: int) -> socket.socket:
        """A connection to a host by name. Raises Refused."""
        return await self._first(await self.addresses(name, port), name, port)

    async def address(self, address: Address, port: int) -> socket.socket:
        """A connection to an address. Raises Refused."""
        good, reason = permitted([address])
        if not good:
            raise Refused(str(address), port, reason)
        return await self._first(good, str(address), port)

    async def _lookup(self, name: str) -> list[Address]:
        """The place among the lookups is free again when the lookup has really ended, not when we stop waiting for it."""
        await self._lookups.acquire()
        loop = asyncio.get_running_loop()
        future = self._outside.lookup(name)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._lookups.release))
        return await asyncio.shield(asyncio.wrap_future(future))

    async def _first(self, addresses: list[Address], host: str, port: int) -> socket.socket:
        reason = "it did not answer in time"
        for address in addresses[:_MOST_TRIED]:
            try:
                async with asyncio.timeout(_CONNECT_S / min(len(addresses), _MOST_TRIED)):
                    return await self._outside.connect(address, port)
            except TimeoutError:
                continue
            except OSError as error:
                reason = f"it cannot be reached: {os.strerror(error.errno) if error.errno else error}"
        raise UnreachableError(host, port, reason)
