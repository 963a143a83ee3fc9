"""Terminals and pipes over a WebSocket. In: `v5.channel.k8s.io` frames. Out: a process's output, and at its end how it ended.

The first byte of a frame is its channel: 0 stdin, 1 stdout, 2 stderr, 3 the end as a Status, 4 a new size, 255 the end of a channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Final

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from sandmill.server.api.context import Context, refused
from sandmill.server.commands import ENDED, Running
from sandmill.server.records import Value
from sandmill.server.refusals import Refusal, not_found

PROTOCOL: Final = "v5.channel.k8s.io"
_OLDER: Final = "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255
_CHANNELS: Final = {"stdout": _STDOUT, "stderr": _STDERR}
_MOST_AT_ONCE: Final = 1 << 16
_PATIENCE_S: Final = 30.0


async def attach(on: Context, socket: WebSocket) -> None:
    """One session. Refusals before the handshake are plain HTTP answers."""
    try:
        who = on.keys.who(socket.headers.get("authorization"))
        project, name = socket.path_params["project"], socket.path_params["name"]
        who.check(project)
        value = on.records.get("Process", project, name)
        if value is None:
            raise not_found("processes", name)
        offered = [word.strip() for word in socket.headers.get("sec-websocket-protocol", "").split(",")]
        chosen = next((protocol for protocol in (PROTOCOL, _OLDER) if protocol in offered), None)
        if chosen is None:
            raise Refusal("BadRequest", f"this session needs the subprotocol {PROTOCOL}")
    except Refusal as refusal:
        await _refuse(socket, refusal)
        return
    await socket.accept(subprotocol=chosen)
    running = on.commands.get(value)
    reading = asyncio.ensure_future(_take(on, socket, value, running))
    writing = asyncio.ensure_future(_give(on, socket, value))
    try:
        await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (reading, writing):
            task.cancel()
        await asyncio.gather(reading, writing, return_exceptions=True)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect, OSError):
            await socket.close()


async def _refuse(socket: WebSocket, refusal: Refusal) -> None:
    await socket.send_denial_response(refused(refusal))


async def _take(on: Context, socket: WebSocket, value: Value, running: Running | None) -> None:
    """Passes input on, until the client goes away."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        data = message.get("bytes") or (message.get("text") or "").encode()
        if not data:
            continue
        channel, rest = data[0], data[1:]
        if channel == _STDIN and running is not None and rest and _takes_input(value):
            await _room(running)
            running.feed(rest)
        elif channel == _RESIZE:
            await _resize(on, value, rest)
        elif channel == _CLOSE and rest[:1] == bytes([_STDIN]) and running is not None and _takes_input(value):
            running.feed(None)


async def _room(running: Running) -> None:
    """Waits while too much input is queued: the client's own socket fills up then."""
    while not running.room:
        await asyncio.sleep(0.01)


async def _give(on: Context, socket: WebSocket, value: Value) -> None:
    """Sends what the process wrote, from its beginning, and how it ended."""
    log = await on.outputs.of(value["metadata"]["uid"])
    at = 0
    while True:
        frames = log.frames(None, at, _MOST_AT_ONCE)
        for frame in frames:
            for start in range(0, len(frame.data), _MOST_AT_ONCE):
                await socket.send_bytes(bytes([_CHANNELS[frame.stream]]) + frame.data[start : start + _MOST_AT_ONCE])
            at = frame.offset + len(frame.data)
        if frames:
            continue
        if log.done:
            break
        await log.wait(_PATIENCE_S)
    ended = on.records.get("Process", value["metadata"]["namespace"], value["metadata"]["name"]) or value
    await socket.send_bytes(bytes([_ERROR]) + msgspec.json.encode(_ending(ended)))


def _ending(value: Value) -> dict[str, Any]:
    """The Status that ends a session: an exit code in its causes, as `kubectl exec` reads it."""
    status = value["status"]
    if status.get("exitCode") == 0 and status["phase"] == "Succeeded":
        return {"metadata": {}, "status": "Success"}
    if "exitCode" in status:
        code = status["exitCode"]
        return {
            "metadata": {},
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": status.get("message", f"command terminated with non-zero exit code: {code}"),
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }
    phase = status["phase"] if status["phase"] in ENDED else "Running"
    message = status.get("message", f"the process is {phase}")
    return {"metadata": {}, "status": "Failure", "reason": "InternalError", "message": message, "code": 500}


def _takes_input(value: Value) -> bool:
    return bool(value["spec"].get("stdin") or value["spec"].get("tty"))


async def _resize(on: Context, value: Value, data: bytes) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        size = json.loads(data)
        rows, columns = int(size["Height"]), int(size["Width"])
        if 0 < rows < 65_536 and 0 < columns < 65_536:
            await on.commands.resize(value, rows, columns)
