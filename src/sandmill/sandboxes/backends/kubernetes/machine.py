"""One pod. In: bytes for the guest. Out: what it writes. Both go over one remotecommand WebSocket, and when that ends the pod does."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import aiohttp
from kubernetes_asyncio.client import ApiException, CoreV1Api

from sandmill.errors import SandboxError
from sandmill.sandboxes.backends.guest.ending import end_tasks, hold, let_go
from sandmill.sandboxes.backends.seam import Hearing

FAILURES: Final = (ApiException, aiohttp.ClientError, OSError)
"""What the package raises for anything that goes wrong outside."""
REQUEST_S: Final = 30.0
_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_PIECE: Final = 32 * 1024
_NOT_FOUND: Final = 404


class Pod:
    """A pod, and the connection to the guest in it."""

    def __init__(self, name: str, namespace: str, api: CoreV1Api, hearing: Hearing) -> None:
        self._name = name
        self._namespace = namespace
        self._api = api
        self._hearing = hearing
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._errors = b""
        self._descriptor = -1

    @property
    def id(self) -> str:
        """The pod's name."""
        return self._name

    def attach(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """From now on the guest is heard and fed over this connection."""
        loop = asyncio.get_running_loop()
        self._socket = socket
        held = socket.get_extra_info("socket")
        self._descriptor = -1 if held is None else held.fileno()
        hold(self._descriptor)
        self._tasks = [loop.create_task(self._feed(socket)), loop.create_task(self._hear(socket))]

    def send(self, data: bytes) -> None:
        """For the guest's standard input."""
        self._queue.put_nowait(data)

    async def destroy(self) -> None:
        """Deletes the pod at once. Raises SandboxError when the cluster does not answer; then the pod ends with its connection."""
        await end_tasks(self._tasks)
        try:
            await self._api.delete_namespaced_pod(self._name, self._namespace, grace_period_seconds=0, _request_timeout=REQUEST_S)
        except FAILURES as error:
            if not isinstance(error, ApiException) or error.status != _NOT_FOUND:
                raise SandboxError(f"pod {self._name} was not deleted: {said(error)}") from error
        finally:
            if self._socket is not None:
                let_go(self._descriptor)
                await self._socket.close()

    async def _feed(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """In order. Nothing is ever sent twice: a broken connection ends the machine."""
        while True:
            data = await self._queue.get()
            try:
                for start in range(0, len(data), _PIECE):
                    await socket.send_bytes(bytes((_STDIN,)) + data[start : start + _PIECE])
            except FAILURES as error:
                self._hearing.ended(f"its connection to the cluster broke: {said(error)}")
                return

    async def _hear(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        why = "its connection to the cluster ended"
        async for message in socket:
            data: bytes = message.data if message.type is aiohttp.WSMsgType.BINARY else b""
            if not data:
                continue
            if data[0] == _STDOUT:
                self._hearing.received(data[1:])
            elif data[0] == _STDERR:
                self._errors = (self._errors + data[1:])[-2000:]
            elif data[0] == _STATUS:
                why = f"the guest ended: {_status(data[1:])}"
        noted = self._errors.decode("utf-8", "replace").strip()
        self._hearing.ended(f"{why}: {noted[-300:]!a}" if noted else why)


def said(error: BaseException) -> str:
    """A foreign message, fit for a sentence."""
    text = str(error) or type(error).__name__
    if isinstance(error, ApiException):
        text = f"{error.status} {error.reason}: {_status(error.body or b'')}"
    return ascii(" ".join(text.split())[:300])[1:-1]


def _status(body: bytes | str) -> str:
    try:
        found = json.loads(body)
    except ValueError:
        return ascii(body[:200])
    return ascii(str(found.get("message") or found.get("status") or found)[:200])[1:-1] if isinstance(found, dict) else ""
