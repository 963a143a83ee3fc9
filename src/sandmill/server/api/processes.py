"""Commands over HTTP. In: a command to run, input, signals; offsets. Out: Process objects and their output, by long polling."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse

from sandmill.config.quantities import parse_duration
from sandmill.errors import ConfigError
from sandmill.server.admission import checked
from sandmill.server.api.context import Asked, answer, decode
from sandmill.server.api.objects import find, read
from sandmill.server.commands import ENDED, SIGNALS, check_env
from sandmill.server.kinds import BY_KIND
from sandmill.server.outputs import STREAMS, Frame, Log
from sandmill.server.records import Value
from sandmill.server.refusals import Cause, Refusal, invalid, not_found
from sandmill.server.schema import Causes, Choice, Flag, Record, Text, Whole, nearest, shown

PROCESS: Final = BY_KIND["Process"]
SANDBOX: Final = BY_KIND["Sandbox"]
_LONGEST_WAIT_S: Final = 60.0
_MOST_AT_ONCE: Final = 1 << 20
_STDIN = Record(
    about="Input for a process, or its end.",
    fields={
        "seq": Whole(about="Numbers the pieces from 1; one that was taken is not taken again.", least=0, most=2**53),
        "data": Text(about="Bytes in base64.", pattern=r"[A-Za-z0-9+/]*={0,2}", expect="base64", longest=1 << 20),
        "eof": Flag(about="Nothing more comes."),
    },
)
_SIZE = Record(
    about="A terminal's size.",
    required=("rows", "cols"),
    fields={"rows": Whole(least=1, most=65_535), "cols": Whole(least=1, most=65_535)},
)
_SIGNAL = Record(fields={"signal": Choice(words=SIGNALS, about="A signal."), "resize": _SIZE}, about="A signal, or a new size.")


async def create(asked: Asked) -> Response:
    """POST sandboxes/NAME/processes: runs a command; wakes a stopped sandbox."""
    asked.query(("dryRun", "fieldManager", "fieldValidation"))
    body = await asked.body()
    asked.media_type(("application/json",))
    path = asked.request.url.path.encode()
    with await asked.on.answers.turn(asked.who.digest, asked.request.headers.get("idempotency-key"), path + b"\0" + body) as turn:
        if turn.before is not None:
            return Response(turn.before.body, turn.before.status, {"Idempotent-Replayed": "true"}, "application/json")
        given = checked(PROCESS, decode(body), asked.project)
        spec = {key: part for key, part in given["spec"].items() if key not in ("state", "sandbox", "sequence", "main")}
        check_env(spec)
        live = await asked.on.boxes.running(asked.project, asked.name)
        value = asked.on.commands.prepare(live, spec)
        made = await asked.on.commands.launch(live, value, lambda stored: turn.answer(201, msgspec.json.encode(stored)))
    return answer(made, 201)


async def kill(asked: Asked) -> Response:
    """DELETE sandboxes/NAME/processes: kills everything in the sandbox; its files stay readable."""
    live = await asked.on.boxes.running(asked.project, asked.name)
    await asked.on.commands.kill_all(live)
    return answer({})


async def get(asked: Asked) -> Response:
    """GET of a process; `wait` holds the answer until it has ended, or that long."""
    wait_s = waiting(asked.request.query_params.get("wait"))
    value = find(asked, PROCESS)
    running = asked.on.commands.get(value)
    if wait_s and running is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await running.ended.wait()
    return await read(asked, PROCESS)


async def output(asked: Asked) -> Response:
    """GET output: frames from an offset on, one JSON object a line; the last says that the process is done."""
    query = asked.query(("after", "stream", "wait", "follow"))
    stream = query.get("stream") or None
    if stream is not None and stream not in STREAMS:
        raise Refusal("BadRequest", f"stream is stdout or stderr, found {shown(stream)}{nearest(stream, list(STREAMS))}")
    after = query.get("after") or "0"
    if not re.fullmatch(r"[0-9]{1,15}", after):
        raise Refusal("BadRequest", f"after is an offset in bytes, found {shown(after)}")
    value = find(asked, PROCESS)
    log = await asked.on.outputs.of(value["metadata"]["uid"])
    ends = time.monotonic() + waiting(query.get("wait"))
    while not (frames := log.frames(stream, int(after), _MOST_AT_ONCE)) and not log.done and (left := ends - time.monotonic()) > 0:
        await log.wait(left)
    lines = [msgspec.json.encode({"stream": f.stream, "offset": f.offset, "data": base64.b64encode(f.data).decode()}) for f in frames]
    if log.done and not log.frames(stream, _after(frames, int(after)), 1):
        lines.append(msgspec.json.encode(_done(find(asked, PROCESS), log)))
    return Response(b"".join(line + b"\n" for line in lines), media_type="application/x-ndjson")


async def stdin(asked: Asked) -> Response:
    """POST stdin: {seq, data} or {seq, eof}. A piece that was taken before is acknowledged and not taken twice."""
    body = await asked.json()
    given = _checked(_STDIN, body, asked.name)
    value = find(asked, PROCESS)
    if not value["spec"].get("stdin") and not value["spec"].get("tty"):
        raise Refusal("Conflict", f"process {asked.name!r} was started without stdin", kind="processes", name=asked.name)
    running = asked.on.commands.get(value)
    if running is None and value["status"]["phase"] not in ENDED:
        raise Refusal("StdinBackpressure", "its node has not reported since this server was restarted", retry_after_s=1)
    if running is None or running.process is None:
        raise Refusal("Conflict", f"process {asked.name!r} has ended and reads no more input", kind="processes", name=asked.name)
    number = given.get("seq", running.last_input + 1)
    if number > running.last_input:
        try:
            data = base64.b64decode(given.get("data", ""), validate=True)
        except (binascii.Error, ValueError):
            raise invalid("processes", asked.name, [Cause("data", "FieldValueInvalid", "expected base64")]) from None
        if data:
            running.feed(data)
        if given.get("eof"):
            running.feed(None)
        running.last_input = number
    return answer({"seq": running.last_input})


async def signals(asked: Asked) -> Response:
    """POST signals: {signal} or {resize: {rows, cols}}. Nothing happens to a process that has ended."""
    given = _checked(_SIGNAL, await asked.json(), asked.name)
    value = find(asked, PROCESS)
    if "signal" in given:
        await asked.on.commands.signal(value, given["signal"])
    if "resize" in given:
        await asked.on.commands.resize(value, given["resize"]["rows"], given["resize"]["cols"])
    return answer({})


async def process_log(asked: Asked) -> Response:
    """GET log of a process, as text."""
    return await text_of(asked, find(asked, PROCESS))


async def sandbox_log(asked: Asked) -> Response:
    """GET log of a sandbox: its own command's output, or that of the process that `process` names."""
    box = find(asked, SANDBOX)
    wanted = asked.request.query_params.get("process")
    owned = [v for v in asked.on.records.list("Process", asked.project) if v["spec"]["sandbox"] == box["metadata"]["name"]]
    owned.sort(key=lambda value: value["spec"]["sequence"])
    if wanted is None:
        chosen = [value for value in owned if value["spec"].get("main")] or owned
    else:
        chosen = [value for value in owned if wanted in (value["metadata"]["name"], str(value["spec"]["sequence"]))]
        if not chosen:
            raise not_found("processes", wanted)
    return await text_of(asked, chosen[-1] if chosen else None)


async def text_of(asked: Asked, value: Value | None) -> Response:
    """The output kept under an object's uid as it was written, both streams together."""
    query = asked.query(
        ("follow", "process", "tailLines", "tail", "sinceSeconds", "since", "timestamps", "attempt", "rank", "index", "limitBytes")
    )
    if value is None:
        return Response(b"", media_type="text/plain; charset=utf-8")
    log = await asked.on.outputs.of(value["metadata"]["uid"])
    tail = query.get("tailLines") or query.get("tail")
    if tail is not None and not re.fullmatch(r"-?[0-9]{1,9}", tail):
        raise Refusal("BadRequest", f"tailLines is a whole number, found {shown(tail)}")
    return StreamingResponse(
        _pieces(log, query.get("follow", "false").lower() in ("true", "1"), tail), media_type="text/plain; charset=utf-8"
    )


async def _pieces(log: Log, follow: bool, tail: str | None) -> AsyncIterator[bytes]:
    at = 0
    if tail is not None and int(tail) >= 0:
        data = b"".join(frame.data for frame in log.frames(None, 0, log.size_bytes + 1))
        at = len(data)
        lines = data.splitlines(keepends=True)
        yield b"".join(lines[len(lines) - int(tail) :] if int(tail) < len(lines) else lines)
    while True:
        frames = log.frames(None, at, _MOST_AT_ONCE)
        for frame in frames:
            yield frame.data
            at = frame.offset + len(frame.data)
        if not frames:
            if log.done or not follow:
                return
            await log.wait(_LONGEST_WAIT_S)


def _after(frames: list[Frame], after: int) -> int:
    return frames[-1].offset + len(frames[-1].data) if frames else after


def _done(value: Value, log: Log) -> dict[str, Any]:
    out: dict[str, Any] = {"done": True, "phase": value["status"]["phase"], "status": value["status"]}
    for key in ("exitCode", "reason"):
        if key in value["status"]:
            out[key] = value["status"][key]
    if log.truncated:
        out["truncated"] = True
    return out


def waiting(text: str | None) -> float:
    """Seconds of a `wait` parameter, a minute at most. Raises Refusal (BadRequest)."""
    if not text:
        return 0.0
    try:
        return min(_LONGEST_WAIT_S, parse_duration(text))
    except ConfigError as error:
        raise Refusal("BadRequest", f"wait: {error.message.encode('ascii', 'backslashreplace').decode()}") from None


def _checked(record: Record, body: Any, name: str) -> Any:
    causes = Causes()
    given = record.check(body, "", causes)
    if causes.found:
        raise invalid("processes", name, causes.found)
    return given
