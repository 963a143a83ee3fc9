"""HTTP/1.1 as a Sandmill server speaks it. In: requests. Out: whole answers, over connections that are kept.

Only what that takes: bodies of known length or in chunks, no redirects, no proxies, no cookies. Hundreds of commands wait at once, each
on a connection of its own, and general clients' pools look at every connection for every request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlencode, urlsplit

from sandmill.errors import ConfigError

_CONNECT_S: Final = 10.0
_ANSWER_S: Final = 90.0
_KEPT: Final = 256
_LONGEST_HEAD: Final = 1 << 16
_LARGEST_BODY: Final = 80 << 20


class Answer(NamedTuple):
    """An answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class BrokenError(ConnectionError):
    """The connection ended before the answer was whole. `stale`: it had been kept, and the server may never have seen the request."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale


class UntrustedError(ConnectionError):
    """Whoever answered has no certificate that this machine trusts. Asking again changes nothing."""


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Http:
    """Connections to one server. On one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        try:
            parts = urlsplit(url)
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"{url!a} is no server's URL; write http://127.0.0.1:8420", field="server") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"{url!a} is no server's URL; write http://127.0.0.1:8420", field="server")
        self._url = url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = {"Host": parts.netloc.rpartition("@")[2], **headers}
        self._kept: list[Connection] = []
        self._busy: set[asyncio.StreamWriter] = set()
        self.closed: str | None = None
        """Why nothing is asked any more, once that is so."""

    def close(self, why: str) -> None:
        """Ends every connection, also under requests that wait for an answer, and makes no new ones. Idempotent."""
        self.closed = self.closed or why
        for writer in (*self._busy, *(writer for _, writer in self._kept)):
            writer.transport.abort()
        self._kept.clear()

    async def request(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Answer:
        """One request. Raises BrokenError, UntrustedError, ConnectionError, TimeoutError."""
        if self.closed is not None:
            raise ConnectionError(self.closed)
        stale = bool(self._kept)
        connection = self._kept.pop() if stale else await self._connect()
        reader, writer = connection
        self._busy.add(writer)
        target = f"{path}?{urlencode(query)}" if query else path
        lines = [f"{name}: {value}" for name, value in {**self._head, **headers, "Content-Length": str(len(body))}.items()]
        try:
            writer.write("\r\n".join((f"{method} {target} HTTP/1.1", *lines, "", "")).encode("latin-1") + body)
            async with asyncio.timeout(_ANSWER_S):
                await writer.drain()
                answer = await _answer(reader)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            writer.close()
            if isinstance(error, TimeoutError):
                raise
            raise BrokenError(f"the connection ended early: {type(error).__name__}", stale=stale) from error
        except BaseException:
            writer.close()  # cancelled: what comes on this connection now is nobody's
            raise
        finally:
            self._busy.discard(writer)
        if answer.headers.get("connection", "").lower() == "close" or len(self._kept) >= _KEPT or self.closed:
            writer.close()
        else:
            self._kept.append(connection)
        return answer

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_LONGEST_HEAD)
        except ssl.SSLCertVerificationError as error:
            message = f"the certificate of {self._url} is not trusted ({error.verify_message}); name its authority's file in SSL_CERT_FILE"
            raise UntrustedError(message) from error
        except ssl.SSLError as error:
            if error.reason != "WRONG_VERSION_NUMBER":
                raise
            raise UntrustedError(f"{self._url} does not speak TLS; write http:// if it is to be trusted without") from error


async def _answer(reader: asyncio.StreamReader) -> Answer:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    status = int(first.split(" ", 2)[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Answer(status, headers, await _chunks(reader))
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= _LARGEST_BODY:
        raise ValueError(f"an answer of {length} bytes")
    return Answer(status, headers, await reader.readexactly(length))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    pieces: list[bytes] = []
    taken = 0
    while length := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        taken += length
        if length < 0 or taken > _LARGEST_BODY:
            raise ValueError("an answer that is too long")
        pieces.append(await reader.readexactly(length))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        continue
    return b"".join(pieces)
