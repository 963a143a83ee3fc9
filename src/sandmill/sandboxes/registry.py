"""Which sandboxes are alive on this machine, and stopping one from another process. In: a name or id. Out: records.

Every owning process answers on a socket in its state folder: one JSON request, one JSON answer. Nothing is written per sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from sandmill.errors import SandboxGone
from sandmill.sandboxes.backends.native import state
from sandmill.sandboxes.dual import block_on

SOCKET: Final = "control.sock"
_ANSWER_S: Final = 5.0
_STOP_S: Final = 15.0
_LONGEST_REQUEST: Final = 1 << 16


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One live sandbox. `name` and `labels` are whatever its creator chose: print them as data."""

    id: str
    name: str
    labels: Mapping[str, str]
    owner_pid: int
    """0: a server."""
    age_s: float
    cpu: float
    memory_bytes: int
    disk_bytes: int
    workdir: str
    version: int = 1


class _Request(msgspec.Struct, frozen=True):
    stop: str | None = None
    """A name or id; without it the request is for the list."""


class _Answer(msgspec.Struct, frozen=True):
    sandboxes: tuple[SandboxRecord, ...] = ()
    """The live ones, or those that were stopped."""


_Message = TypeVar("_Message", _Request, _Answer)


class Listed(Protocol):
    """What a registry holds."""

    def record(self) -> SandboxRecord: ...

    async def stop(self, reason: str, *, gently: bool = False) -> None: ...


class Registry:
    """One owner's live sandboxes, and the socket that answers for them. On the sandbox loop."""

    def __init__(self) -> None:
        self._live: dict[str, Listed] = {}
        self._server: asyncio.Server | None = None
        self._stops: set[asyncio.Task[None]] = set()

    def add(self, id: str, sandbox: Listed) -> None:
        """From now on it is listed."""
        self._live[id] = sandbox

    def remove(self, id: str) -> None:
        """No longer. Idempotent."""
        self._live.pop(id, None)

    def records(self) -> tuple[SandboxRecord, ...]:
        """All of them, oldest first. May be called from any thread."""
        return tuple(sandbox.record() for sandbox in list(self._live.values()))

    async def serve(self, folder_fd: int) -> None:
        """Answers until the process ends. The path goes through the descriptor: a socket's name may have 107 bytes at most."""
        self._server = await asyncio.start_unix_server(self._answer, _through(folder_fd))

    def close(self) -> None:
        """Answers no more."""
        if self._server is not None:
            self._server.close()

    def stop_all(self, reason: str) -> None:
        """Ends every one of them, without waiting for it."""
        for sandbox in list(self._live.values()):
            task = asyncio.get_running_loop().create_task(sandbox.stop(reason))
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)

    async def stop_named(self, wanted: str) -> tuple[SandboxRecord, ...]:
        """Stops those with this name or id."""
        chosen = [sandbox for sandbox in self._live.values() if wanted in (sandbox.record().id, sandbox.record().name)]
        records = tuple(sandbox.record() for sandbox in chosen)
        await asyncio.gather(*(sandbox.stop("stopped by another process", gently=True) for sandbox in chosen))
        return records

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                async with asyncio.timeout(_ANSWER_S):
                    request = _from_json(await reader.readline(), _Request)
                chosen = self.records() if request.stop is None else await self.stop_named(request.stop)
                writer.write(_to_json(_Answer(chosen)))
                await writer.drain()
            except (OSError, ValueError, TimeoutError):
                return  # whoever asked is gone or does not speak this language


def list_sandboxes(server: str = "") -> list[SandboxRecord]:
    """The sandboxes alive on this machine in this user's state folder, of all processes, oldest first; or those of a server, by its URL.

    Raises, for a server, ConfigError and SandboxError.
    """
    if server:
        from sandmill.sandboxes.backends.remote.listing import records

        return block_on(records(server))
    found = [record for folder in state.live_owners() for record in _ask(folder, _Request(), _ANSWER_S)]
    return sorted(found, key=lambda record: -record.age_s)


def stop_sandbox(name_or_id: str, server: str = "") -> list[SandboxRecord]:
    """Stops every sandbox of that name or id, whichever process owns it, or a server, and returns what was stopped.

    Raises SandboxGone when there is none; for a server, ConfigError and SandboxError.
    """
    if server:
        from sandmill.sandboxes.backends.remote.listing import stop

        stopped = block_on(stop(server, name_or_id))
    else:
        stopped = [record for folder in state.live_owners() for record in _ask(folder, _Request(stop=name_or_id), _STOP_S)]
    if not stopped:
        raise SandboxGone(name_or_id, "no live sandbox has this name or id")
    return stopped


def _ask(folder: Path, request: _Request, patience_s: float) -> tuple[SandboxRecord, ...]:
    """One owner's answer; an owner that dies meanwhile, or does not answer, has no sandboxes to show."""
    deadline = time.monotonic() + patience_s
    pieces: list[bytes] = []
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(patience_s)
            asking.connect(_through(descriptor))
            asking.sendall(_to_json(request) + b"\n")
            while piece := asking.recv(_LONGEST_REQUEST):
                pieces.append(piece)
                asking.settimeout(max(0.01, deadline - time.monotonic()))
        return _from_json(b"".join(pieces), _Answer).sandboxes
    except (OSError, ValueError):
        return ()
    finally:
        os.close(descriptor)


def _to_json(value: _Request | _Answer) -> bytes:
    """ASCII JSON: a name may hold half an emoji, which UTF-8 cannot carry."""
    return json.dumps(msgspec.to_builtins(value)).encode()


def _from_json(data: bytes, kind: type[_Message]) -> _Message:
    return msgspec.convert(json.loads(data), kind)


def _through(folder_fd: int) -> str:
    return f"/proc/self/fd/{folder_fd}/{SOCKET}"
