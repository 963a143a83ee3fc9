"""The one place where a sandbox's connections leave this machine. In: a name, or an address that was checked. Out: addresses, a socket.

`Outside` is a seam: tests put a network of their own behind it. It is reachable only as an argument in Python.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from ipaddress import IPv4Address, ip_address
from typing import Final, Protocol

from sandmill.sandboxes.egress.addresses import Address

_LOOKUP_THREADS: Final = 32


class Outside(Protocol):
    """What lies beyond the proxy. Nothing here decides what is allowed."""

    def lookup(self, name: str) -> Future[list[Address]]:
        """Starts to look a name up; the future ends when whatever it occupies is free again. Fails with OSError."""
        ...

    async def connect(self, address: Address, port: int) -> socket.socket:
        """A connected, non-blocking TCP socket. Raises OSError."""
        ...


class HostNetwork:
    """This machine's resolver and routes."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="sandmill-lookup")

    def lookup(self, name: str) -> Future[list[Address]]:
        """By getaddrinfo, in a thread. The trailing dot keeps the machine's search domains out of it."""
        return self._threads.submit(_getaddrinfo, f"{name}.")

    async def connect(self, address: Address, port: int) -> socket.socket:
        """By the machine's own routes."""
        family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (str(address), port))
        except BaseException:
            connection.close()
            raise
        return connection


def _getaddrinfo(name: str) -> list[Address]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys(ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))
