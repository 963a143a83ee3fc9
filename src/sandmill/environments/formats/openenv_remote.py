"""An OpenEnv server of the user's own. In: its URL. Out: what a package in a sandbox would answer, over the server's WebSocket.

Nothing of it runs here; what it says is read as any package's answers are. Only the URL that a person wrote is connected to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from sandmill.environments.formats.adapters.openenv import OpenEnv, RemoteServer
from sandmill.environments.packages.answers import encode, plain, score
from sandmill.environments.packages.protocol import Description, Members, Row, Rows, Score, read
from sandmill.environments.verdicts import reason_of
from sandmill.errors import ConfigError, GraderFailed

M = TypeVar("M", bound=msgspec.Struct)
_DESCRIBE_S: Final = 120.0


class RemoteService:
    """See `AskedService`."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            import websockets  # noqa: F401
        except ImportError:
            raise ConfigError("a server of one's own is spoken to through websockets: pip install 'sandmill[server]'") from None
        self._url = url
        self._options = dict(options)
        self._known: RemoteServed | None = None

    async def worker(self) -> RemoteServed:
        """The server, described when first asked. Raises GraderFailed, TimeoutError."""
        if self._known is None:
            environment = OpenEnv(RemoteServer(self._url), self._options)
            description = await _asked(environment, "describe", {}, Description, _DESCRIBE_S)
            self._known = RemoteServed(self._url, environment, description)
        return self._known

    def another(self) -> None:
        """There is one server, with the places that it has."""
        return

    async def close(self) -> None:
        """Nothing: the server is the user's."""


class RemoteServed:
    """See `Asked`."""

    def __init__(self, url: str, environment: OpenEnv, description: Description) -> None:
        self._url = url
        self._environment = environment
        self.description = description

    async def tasks(self, split: str, start: int, stop: int, *, timeout_s: float) -> tuple[Row, ...]:
        """See `Asked`."""
        found = await _answer(self._environment, "tasks", {"split": split, "start": start, "stop": stop}, timeout_s)
        rows = read(b'{"rows":' + found + b"}", Rows, f"a task of split {split!a}").rows
        return tuple(msgspec.structs.replace(row, row=row.row.copy()) for row in rows)

    async def grade(self, row: msgspec.Raw, answer: str | None, context: Mapping[str, Any] | None = None, *, timeout_s: float) -> Score:
        """See `Asked`."""
        raise GraderFailed("an OpenEnv server grades steps, not answers")

    async def grade_group(self, row: msgspec.Raw, members: Sequence[Mapping[str, Any] | msgspec.Raw], *, timeout_s: float) -> Members:
        """See `Asked`."""
        raise GraderFailed("an OpenEnv server grades steps, not groups")

    def session(self) -> RemoteSession:
        """An episode, over a connection of its own."""
        return RemoteSession(self._environment.episode(RemoteServer(self._url)))


class RemoteSession:
    """See `AskedSession`."""

    def __init__(self, episode: OpenEnv) -> None:
        self._episode = episode

    async def call(self, method: str, params: Mapping[str, Any], kind: type[M], *, timeout_s: float, seed: int | None = None) -> M:
        """See `AskedSession`. The server draws from what its reset is given, not from `seed`."""
        return await _asked(self._episode, method, params, kind, timeout_s)

    async def close(self) -> None:
        """Ends the connection."""
        if self._episode.wire is not None:
            await self._episode.wire.close()


async def _asked(environment: OpenEnv, method: str, params: Mapping[str, Any], kind: type[M], timeout_s: float) -> M:
    return read(await _answer(environment, method, params, timeout_s), kind, f"the server's answer to {method}")


async def _answer(environment: OpenEnv, method: str, params: Mapping[str, Any], timeout_s: float) -> bytes:
    sent = {name: msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value for name, value in params.items()}
    try:
        async with asyncio.timeout(timeout_s):
            returned = await getattr(environment, method)(**sent)
        return encode(score(returned, "the score") if method == "finish" else plain(returned, "the answer"))
    except TimeoutError:
        raise TimeoutError(f"the server took longer than {timeout_s:g} s") from None
    except Exception as error:
        raise GraderFailed(f"the server at {environment.server} could not be asked: {reason_of(error)}") from error
