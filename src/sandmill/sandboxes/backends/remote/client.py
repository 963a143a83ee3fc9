"""The conversation with a Sandmill server. In: requests. Out: decoded answers, or the error of the boundary that broke.

Every request that changes something carries an idempotency key, so repeating it after a broken connection does nothing twice. All on
the sandbox loop.
"""

from __future__ import annotations

import asyncio
import errno
import json as codec
import os
import secrets
from collections.abc import Mapping
from typing import Any, Final

from sandmill.errors import ConfigError, ImageError, IsolationUnavailable, SandboxCreateFailed, SandboxError, SandboxFileError, SandboxGone
from sandmill.sandboxes.backends.remote.http import Answer, BrokenError, Http, UntrustedError

GROUP: Final = "/apis/nodus.dev/v1"
_RETRY_FOR_S: Final = 20.0
WAIT_FOR_ROOM_S: Final = 120.0
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_BETWEEN: Final = (502, 503, 504)
"""A proxy's own words: whether its server got the request is unknown, and asking again with the same key is safe."""
_ROOM: Final = ("QuotaExceeded", "SandboxStarting", "Unavailable", "CapacityUnavailable")


class AnswerError(Exception):
    """The server said no. `reason` is the API's word for it."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        self.reason = str(body.get("reason", f"HTTP {status}"))
        self.message = str(body.get("message", self.reason))
        self.fix = str(body.get("fix", ""))
        details = body.get("details")
        causes = details.get("causes", ()) if isinstance(details, dict) else ()
        self.causes: tuple[Mapping[str, str], ...] = tuple(causes)
        super().__init__(self.message)

    def of_file(self, path: str) -> SandboxFileError:
        """As the error of a path in the sandbox."""
        word = next((cause["reason"] for cause in self.causes if cause.get("field") == "path"), "EIO")
        number = getattr(errno, word, errno.EIO)
        return SandboxFileError(number, f"in the sandbox: {os.strerror(number)}", path)

    def of_sandbox(self, name: str) -> SandboxError:
        """As the error of a sandbox that was asked for something."""
        if self.status in (401, 403) and self.reason in ("Unauthorized", "Forbidden"):
            return SandboxGone(name, f"its server refused the key: {self.message}")
        if self.reason == "Unsupported":
            return SandboxError(self.message)
        return SandboxGone(name, self.message)

    def of_creation(self) -> Exception:
        """As the error of a creation."""
        if self.reason in ("Unauthorized", "Forbidden"):
            return ConfigError(f"the server refused the key: {self.message}; set SANDMILL_API_KEY", field="server")
        if self.reason == "ImageNotFound":
            return ImageError(self.message)
        if self.reason in ("Invalid", "BadRequest"):
            return ConfigError(self.message, field=next((str(cause["field"]) for cause in self.causes), None))
        if self.reason == "Unsupported":
            return IsolationUnavailable(self.message)
        return SandboxCreateFailed(self.message)


class Client:
    """One server, one key, one project."""

    def __init__(self, url: str, key: str, project: str) -> None:
        self.url = url
        self.project = project
        self._http = Http(url, {"Authorization": f"Bearer {key}"})
        self._ending: set[asyncio.Task[Answer]] = set()

    def close(self, why: str) -> None:
        """Every request, also those under way, fails from now on for this reason. Idempotent."""
        self._http.close(why)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        data: bytes | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        room_s: float = 0.0,
    ) -> Answer:
        """One request below the project, or at a `path` that begins with a slash.

        Raises AnswerError, ConnectionError when the server stays out of reach, and at once when whoever answers is not trusted.
        `room_s`: how long to try again when the server has no room at present.
        """
        sent = {"Content-Type": "application/json"} if json is not None else {}
        sent |= headers or {}
        body = (data or b"") if json is None else codec.dumps(json).encode()
        if method == "POST":
            sent["Idempotency-Key"] = secrets.token_hex(16)
        target = path if path.startswith("/") else f"{GROUP}/namespaces/{self.project}/{path}"
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), _PAUSE_S
        while True:
            try:
                answer = await self._http.request(method, target, query or {}, sent, body)
                if answer.status in _BETWEEN and "reason" not in object_of(answer):
                    raise ConnectionError(f"HTTP {answer.status} from what stands before it")
            except UntrustedError:
                raise
            except OSError as error:
                if self._http.closed is not None:
                    raise ConnectionError(self._http.closed) from error
                if isinstance(error, BrokenError) and error.stale:
                    continue
                if loop.time() - began > _RETRY_FOR_S:
                    raise ConnectionError(f"the server {self.url} cannot be reached: {error or type(error).__name__}") from error
            else:
                if answer.status < 400:
                    return answer
                refused = AnswerError(answer.status, object_of(answer))
                if refused.reason not in _ROOM or loop.time() - began > room_s:
                    raise refused
                pause = min(_LONGEST_PAUSE_S, float(answer.headers.get("retry-after", pause)))
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A new sandbox's object; waits while the server has no room."""
        making = asyncio.get_running_loop().create_task(self.ask("POST", "sandboxes", json=body, room_s=WAIT_FOR_ROOM_S))
        try:
            return object_of(await asyncio.shield(making))
        except asyncio.CancelledError:
            making.add_done_callback(self._unwanted)  # the request is on its way: what it makes must not stay
            raise

    def _unwanted(self, made: asyncio.Task[Answer]) -> None:
        if not made.cancelled() and made.exception() is None:
            name = object_of(made.result())["metadata"]["name"]
            end = asyncio.get_running_loop().create_task(self.ask("DELETE", f"sandboxes/{name}"))
            self._ending.add(end)
            end.add_done_callback(self._ended)

    def _ended(self, end: asyncio.Task[Answer]) -> None:
        self._ending.discard(end)
        if not end.cancelled():
            end.exception()  # nobody waits for it; what stays is the server's to end


def object_of(answer: Answer) -> dict[str, Any]:
    """An answer's JSON object; what is none becomes a message."""
    try:
        found = codec.loads(answer.body)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": ascii(answer.body[:300]) or f"HTTP {answer.status}"}


_clients: dict[tuple[asyncio.AbstractEventLoop, str, str, str], Client] = {}


def client_of(url: str) -> Client:
    """The client of a server, with the key and project of the environment. On the sandbox loop. Raises ConfigError."""
    key, project = os.environ.get("SANDMILL_API_KEY", ""), os.environ.get("SANDMILL_PROJECT", "default")
    if not key:
        raise ConfigError("a server needs a key; set SANDMILL_API_KEY", field="server")
    place = (asyncio.get_running_loop(), url, key, project)
    if place not in _clients:
        _clients[place] = Client(url, key, project)
    return _clients[place]


os.register_at_fork(after_in_child=_clients.clear)
