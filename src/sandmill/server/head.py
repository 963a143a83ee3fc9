"""Speaking with a server about nodes. In: its URL and a key. Out: answers, or one sentence on what is wrong. On the sandbox loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from sandmill.errors import ConfigError
from sandmill.sandboxes.backends.remote.client import AnswerError, object_of
from sandmill.sandboxes.backends.remote.http import Http

_NODES: Final = "/apis/nodus.dev/v1/nodes"
_ANSWER_S: Final = 10.0
_MERGE: Final = "application/merge-patch+json"


class Head:
    """A server that has nodes, for whoever holds a key."""

    def __init__(self, url: str, key: str) -> None:
        if not key:
            raise ConfigError("a server needs a key; set SANDMILL_API_KEY or give --key-file", field="URL")
        self.url = url
        self._http = Http(url, {"Authorization": f"Bearer {key}"})

    async def beat(self, name: str, body: bytes) -> dict[str, Any]:
        """Sends a node's beat. Raises AnswerError, OSError, TimeoutError."""
        return await self._ask("POST", f"/{name}/beats", body)

    async def nodes(self) -> list[dict[str, Any]]:
        """All nodes. Raises ConfigError."""
        found: list[dict[str, Any]] = (await self._asked("GET", "", b""))["items"]
        return found

    async def set(self, name: str, spec: Mapping[str, str]) -> dict[str, Any]:
        """Changes a node's spec and returns the node. Raises ConfigError."""
        return await self._asked("PATCH", f"/{name}", msgspec.json.encode({"spec": dict(spec)}))

    async def node(self, name: str) -> dict[str, Any]:
        """One node. Raises ConfigError."""
        return await self._asked("GET", f"/{name}", b"")

    async def remove(self, name: str) -> None:
        """Forgets a node. Raises ConfigError."""
        await self._asked("DELETE", f"/{name}", b"")

    async def _asked(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        try:
            return await self._ask(method, path, body)
        except AnswerError as error:
            fix = error.fix.replace("NODUS_API_KEY", "SANDMILL_API_KEY")  # the API speaks to the published client
            raise ConfigError(f"{error.message}; {fix}" if fix else error.message) from error
        except OSError as error:
            raise ConfigError(f"the server {self.url} cannot be reached: {error or type(error).__name__}") from error

    async def _ask(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        kind = _MERGE if method == "PATCH" else "application/json"
        async with asyncio.timeout(_ANSWER_S):
            answer = await self._http.request(method, _NODES + path, {}, {"Content-Type": kind}, body)
        if answer.status >= 400:
            raise AnswerError(answer.status, object_of(answer))
        return object_of(answer)
