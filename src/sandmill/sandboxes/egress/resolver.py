"""A sandbox's name server. In: DNS queries from inside. Out: answers made here.

For an allow-list no query causes any other: every allowed name gets an address of its own out of a range that leads nowhere, and is
resolved when a connection names it. Data in the labels of a name, in other record types, or in the timing of answers goes nowhere.
With open egress names are really looked up, and answered with those addresses that may be connected to.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from ipaddress import IPv4Address
from typing import Final

from sandmill.sandboxes.egress import dns
from sandmill.sandboxes.egress.addresses import Address
from sandmill.sandboxes.egress.blocked import BlockedLog, Refused
from sandmill.sandboxes.egress.policy import Policy
from sandmill.sandboxes.egress.reach import Reach, UnreachableError
from sandmill.sandboxes.egress.stream import EndOfStream, Pace, Stream, readable

PORT: Final = 53
_FIRST_ADDRESS: Final = int(IPv4Address("198.18.0.1"))
_ADDRESSES: Final = (1 << 17) - 2
_MOST_NAMES: Final = 4096
_MOST_AT_ONCE: Final = 16
_QUERIES_PER_S: Final = 100.0
_QUERIES_AT_ONCE: Final = 200


class StandIns:
    """An address for each name, the same for as long as it is in use: clients share connections between names with one address."""

    def __init__(self) -> None:
        self._given: OrderedDict[str, IPv4Address] = OrderedDict()
        self._count = 0

    def address(self, name: str) -> IPv4Address:
        """The name's own; the name that was asked for least recently may lose its."""
        if name not in self._given:
            self._given[name] = IPv4Address(_FIRST_ADDRESS + self._count % _ADDRESSES)
            self._count += 1
            if len(self._given) > _MOST_NAMES:
                self._given.popitem(last=False)
        self._given.move_to_end(name)
        return self._given[name]

    def name(self, address: Address) -> str | None:
        """Whose it is, None when it is nobody's."""
        return next((name for name, given in self._given.items() if given == address), None)


class Resolver:
    """On the egress loop."""

    def __init__(self, policy: Policy, reach: Reach, blocked: BlockedLog) -> None:
        self._policy = policy
        self._reach = reach
        self._blocked = blocked
        self._stand_ins = StandIns()
        self._pace = Pace(_QUERIES_PER_S, _QUERIES_AT_ONCE)
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)
        self._answers: set[asyncio.Task[None]] = set()

    async def serve_datagrams(self, end: socket.socket) -> None:
        """Answers queries over UDP until cancelled. What comes faster than the pace waits in the socket, and is lost when that is full."""
        option = socket.IPV6_RECVPKTINFO if end.family == socket.AF_INET6 else _IP_PKTINFO
        end.setsockopt(socket.IPPROTO_IPV6 if end.family == socket.AF_INET6 else socket.IPPROTO_IP, option, 1)
        try:
            while True:
                await readable(end)
                await self._pace.take()
                await self._places.acquire()
                try:
                    data, ancillary, _, sender = end.recvmsg(dns.LARGEST_QUERY + 1, 256)
                except OSError:
                    self._places.release()
                    continue
                task = asyncio.ensure_future(self._answer_datagram(end, data, ancillary, sender))
                self._answers.add(task)
                task.add_done_callback(self._answers.discard)
        finally:
            for task in self._answers:
                task.cancel()

    async def serve_stream(self, client: Stream) -> None:
        """Answers queries over one TCP connection, each with its length in front. Raises OSError, EndOfStream."""
        while True:
            size = int.from_bytes(await _exactly(client, 2))
            if not 0 < size <= dns.LARGEST_QUERY:
                return
            query = await _exactly(client, size)
            await self._pace.take()
            answer = await self.answer(query)
            if answer is None:
                return
            await client.send(len(answer).to_bytes(2) + answer)

    def name_of(self, address: Address) -> str | None:
        """The name that was answered with this stand-in address."""
        return self._stand_ins.name(address)

    async def answer(self, data: bytes) -> bytes | None:
        """The answer to one query; None to what is no query."""
        try:
            query = dns.parse(data)
        except dns.MalformedQueryError:
            return None
        try:
            name = self._policy.check(query.name, PORT)
            if query.kind not in (dns.A, dns.AAAA):
                return dns.answer(query, dns.NO_ERROR)
            return dns.answer(query, dns.NO_ERROR, await self._addresses(name))
        except UnreachableError:
            return dns.answer(query, dns.NO_SUCH_NAME)
        except Refused as refused:
            self._blocked.add(refused)
            return dns.answer(query, dns.NO_SUCH_NAME)

    async def _addresses(self, name: str) -> list[Address]:
        return await self._reach.addresses(name, PORT) if self._policy.open else [self._stand_ins.address(name)]

    async def _answer_datagram(self, end: socket.socket, data: bytes, ancillary: list[tuple[int, int, bytes]], sender: object) -> None:
        """From the address that was asked (it comes along as ancillary data), or the client would not take it."""
        try:
            answer = await self.answer(data)
            if answer is not None:
                end.sendmsg([answer], ancillary, 0, sender)  # type: ignore[arg-type]
        except OSError:
            return  # whoever asked is gone
        finally:
            self._places.release()


_IP_PKTINFO: Final = 8


async def _exactly(client: Stream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await client.receive(count - len(data))
        if not piece:
            raise EndOfStream(data)
        data += piece
    return data
