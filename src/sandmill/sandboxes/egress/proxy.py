"""One sandbox's way out. In: the listening sockets that the warden opened in its network namespace, and a policy. Out: connections.

The namespace has no other way out: every address in it is local, so whatever the sandbox connects to arrives here or is refused by the
kernel. With an allow-list the address that was dialled does not matter: the host is what the client names (TLS: the server name in its
greeting, HTTP: each request's host), and is resolved here. With open egress the dialled address is connected to, if it is public.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from sandmill.sandboxes.egress import http, resolver, tls
from sandmill.sandboxes.egress.addresses import Address, plain
from sandmill.sandboxes.egress.blocked import Blocked, BlockedLog, Refused
from sandmill.sandboxes.egress.outside import Outside
from sandmill.sandboxes.egress.policy import Policy
from sandmill.sandboxes.egress.reach import Reach, UnreachableError
from sandmill.sandboxes.egress.resolver import Resolver
from sandmill.sandboxes.egress.stream import Clock, EndOfStream, Pace, Stream, copy, pump, readable, run_until_idle
from sandmill.sandboxes.egress.thread import all_places, egress_loop, on_egress_loop
from sandmill.sandboxes.spec import Egress

MOST_CONNECTIONS: Final = 128
"""At once, per sandbox. Further ones wait until others end."""
IDLE_S: Final = 300.0
"""After which a connection on which nothing moves ends."""
GREETING_S: Final = 10.0
"""For a client to say whom it wants."""
_MOST_GREETING_READS: Final = 64
_CONNECTIONS_PER_S: Final = 100.0
_CONNECTIONS_AT_ONCE: Final = 200
_READS_PER_S: Final = 2000.0
_READS_AT_ONCE: Final = 500
_HTTP_PORT: Final = 80
_TLS_PORT: Final = 443
_SO_ORIGINAL_DST: Final = 80

Serve = Callable[[Stream], Awaitable[None]]


class EgressProxy:
    """Made anywhere; `start` and `close` run on the egress loop, from whatever loop they are awaited. Owns the listening sockets."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        egress: Egress,
        outside: Outside,
        *,
        idle_s: float = IDLE_S,
        greeting_s: float = GREETING_S,
    ) -> None:
        self._listeners = tuple(listeners)
        self._idle_s = idle_s
        self._greeting_s = greeting_s
        self._policy = Policy(egress)
        self._outside = outside
        self._log = BlockedLog()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """What was refused so far. From any thread, also after the end."""
        return self._log.entries()

    async def start(self) -> None:
        """Begins to serve. If it is interrupted, nothing stays."""
        try:
            await on_egress_loop(self._start())
        except BaseException:
            asyncio.run_coroutine_threadsafe(self._close(), egress_loop())
            raise

    async def close(self) -> None:
        """Ends every connection and listens no more. Idempotent."""
        await on_egress_loop(self._close())

    async def _start(self) -> None:
        self._reach = Reach(self._outside)
        self._resolver = Resolver(self._policy, self._reach, self._log)
        self._places = asyncio.Semaphore(MOST_CONNECTIONS)
        self._new = Pace(_CONNECTIONS_PER_S, _CONNECTIONS_AT_ONCE)
        self._reads = Pace(_READS_PER_S, _READS_AT_ONCE)
        datagrams, *streams = self._listeners
        serves = (self._serve_any,) if self._policy.open else (self._serve_dns, self._serve_http, self._serve_tls)
        self._begin(self._resolver.serve_datagrams(datagrams))
        for listener, serve in zip(streams, serves, strict=True):
            self._begin(self._accept(listener, serve))

    async def _close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket, serve: Serve) -> None:
        while True:
            await self._new.take()
            await self._places.acquire()
            await readable(listener)
            try:
                end, _ = listener.accept()
            except OSError:  # no descriptor left, or the client has hung up
                self._places.release()
                await asyncio.sleep(0.1)
                continue
            end.setblocking(False)
            self._begin(self._serve(end, serve)).add_done_callback(partial(self._done, end))

    def _done(self, end: socket.socket, _: asyncio.Task[None]) -> None:
        """Also of a connection that was ended before it was begun with."""
        end.close()
        self._places.release()

    async def _serve(self, end: socket.socket, serve: Serve) -> None:
        try:
            async with all_places():
                await serve(Stream(end, self._reads, Clock(self._idle_s)))
        except Refused as refused:
            self._log.add(refused)
            if self._policy.open:  # the client is connected by now: a reset is the nearest to a refusal that is left
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (OSError, EndOfStream, TimeoutError):
            pass  # one side hung up or said nothing

    async def _serve_dns(self, client: Stream) -> None:
        await run_until_idle(client.clock, [self._resolver.serve_stream(client)], together=True)

    async def _serve_tls(self, client: Stream) -> None:
        try:
            async with asyncio.timeout(self._greeting_s):
                greeting, name = await self._greeting(client)
            server = self._stream(await self._reach.name(self._policy.check(name, _TLS_PORT), _TLS_PORT), client)
        except Refused:
            await _say(client, tls.ACCESS_DENIED)
            raise
        with server.end:
            await server.send(greeting)
            await run_until_idle(client.clock, [pump(server, client), pump(client, server)], together=True)

    async def _greeting(self, client: Stream) -> tuple[bytes, str]:
        """The first bytes, and the server they name."""
        data = b""
        for _ in range(_MOST_GREETING_READS):
            piece = await client.receive(tls.LARGEST_HELLO)
            if not piece:
                raise EndOfStream(data)
            data += piece
            try:
                name = tls.server_name(data)
            except tls.NoServerNameError as error:
                raise Refused(self._dialled(client.end), _TLS_PORT, str(error)) from None
            if name is not None:
                return data, name
        raise Refused(self._dialled(client.end), _TLS_PORT, "a TLS greeting in too many pieces")

    async def _serve_http(self, client: Stream) -> None:
        try:
            async with asyncio.timeout(self._greeting_s):
                request = await self._request(client)
            host = self._policy.check(request.host, _HTTP_PORT)
            server = self._stream(await self._reach.name(host, _HTTP_PORT), client)
        except Refused as refused:
            status = "502 Bad Gateway" if isinstance(refused, UnreachableError) else "403 Forbidden"
            await _say(client, http.reply(status, f"sandmill: no connection to this host from this sandbox: {refused.reason}"))
            raise
        with server.end:
            await run_until_idle(client.clock, [pump(server, client), self._requests(request, host, client, server)], together=False)

    async def _request(self, client: Stream) -> http.Request:
        head = await client.until(b"\r\n\r\n", http.LARGEST_HEAD)
        try:
            if head is None:
                raise http.BadRequestError("an HTTP request that is too long")
            return http.parse(head)
        except http.BadRequestError as error:
            raise Refused(self._dialled(client.end), _HTTP_PORT, str(error)) from None

    async def _requests(self, request: http.Request, host: str, client: Stream, server: Stream) -> None:
        """One request after another, each checked: a connection that was opened for one host serves no other."""
        while True:
            await server.send(request.head)
            try:
                await _body(request, client, server)
            except http.BadRequestError as error:
                raise Refused(host, _HTTP_PORT, str(error)) from None
            try:
                request = await self._request(client)
            except EndOfStream:
                server.finish()
                return
            if self._policy.check(request.host, _HTTP_PORT) != host:
                raise Refused(request.host, _HTTP_PORT, f"on a connection to {host}")

    async def _serve_any(self, client: Stream) -> None:
        address, port = original(client.end)
        if port == resolver.PORT:
            await self._serve_dns(client)
            return
        server = self._stream(await self._reach.address(address, port), client)
        with server.end:
            await run_until_idle(client.clock, [pump(server, client), pump(client, server)], together=True)

    def _dialled(self, end: socket.socket) -> str:
        """What a client connected to, for a person: a name where its address stands for one."""
        address = plain(ipaddress.ip_address(end.getsockname()[0]))
        return self._resolver.name_of(address) or str(address)

    def _stream(self, end: socket.socket, client: Stream) -> Stream:
        return Stream(end, self._reads, client.clock)


async def _body(request: http.Request, client: Stream, server: Stream) -> None:
    """Sends a request's body on, chunks in their plainest form. Raises BadRequestError, EndOfStream, OSError."""
    if request.body_bytes != http.CHUNKED:
        await copy(client, server, request.body_bytes)
        return
    while size := http.chunk_bytes(await _line(client)):
        await server.send(b"%x\r\n" % size)
        await copy(client, server, size)
        if await _line(client) != b"\r\n":
            raise http.BadRequestError("a malformed HTTP chunk")
        await server.send(b"\r\n")
    for _ in range(64):
        if await _line(client) == b"\r\n":
            await server.send(b"0\r\n\r\n")
            return
    raise http.BadRequestError("an HTTP request with too many trailers")


async def _line(client: Stream) -> bytes:
    line = await client.until(b"\r\n", http.LONGEST_CHUNK_LINE)
    if line is None:
        raise http.BadRequestError("a malformed HTTP chunk")
    return line


async def _say(client: Stream, answer: bytes) -> None:
    """Why nothing comes. A client that has hung up meanwhile was refused all the same."""
    with contextlib.suppress(OSError):
        await client.send(answer)


def original(end: socket.socket) -> tuple[Address, int]:
    """Address and port that a redirected client had connected to. Raises OSError."""
    here = ipaddress.ip_address(end.getsockname()[0])
    if isinstance(plain(here), ipaddress.IPv4Address):
        port, packed = struct.unpack("!2xH4s8x", end.getsockopt(socket.IPPROTO_IP, _SO_ORIGINAL_DST, 16))
    else:
        port, packed = struct.unpack("!2xH4x16s4x", end.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, 28))
    return ipaddress.ip_address(packed), port
