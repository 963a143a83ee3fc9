"""A fleet that speaks the E2B protocol, for the unmodified `e2b` package: its REST interface, and in each "microVM" (a native sandbox)
the process service over Connect and the files endpoint. Faults are scripted with `busy`, `refuse_input` and `lose`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process.process_connect import Process as ProcessService
from e2b.envd.process.process_connect import ProcessASGIApplication
from e2b.envd.process.process_pb import (
    CloseStdinResponse,
    ProcessEvent,
    SendInputResponse,
    SendSignalResponse,
    Signal,
    StartRequest,
    StartResponse,
)
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandmill.sandboxes import PIPE, Process, Sandbox

KEY = "e2b_0123456789abcdef"
ENVD = "0.6.0"


class Fleet(ProcessService):
    """All microVMs and their processes."""

    def __init__(self) -> None:
        self.boxes: dict[str, Sandbox] = {}
        self.asked: list[dict[str, Any]] = []
        """The bodies of all creations."""
        self.processes: dict[tuple[str, int], Process] = {}
        self.expiries: dict[str, asyncio.TimerHandle] = {}
        self.busy = 0
        """So many creations are refused for now."""
        self.refuse_input = 0
        """So many inputs are refused for now."""
        self.inputs = 0

    def app(self) -> Any:
        service = ProcessASGIApplication(self)
        routes = [
            *(Route(path, self.create, methods=["POST"]) for path in ("/sandboxes", "/v2/sandboxes")),
            Route("/v2/sandboxes", self.listed),
            Route("/sandboxes/{id}", self.kill, methods=["DELETE"]),
            Route("/sandboxes/{id}/timeout", self.timeout, methods=["POST"]),
            Route("/files", self.upload, methods=["POST"]),
            Route("/health", self.health),
        ]
        rest = Starlette(routes=routes)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            inner = service if scope["type"] == "http" and scope["path"].startswith("/process.Process/") else rest
            await inner(scope, receive, send)

        return app

    async def create(self, request: Request) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "no such key"}, 401)
        if self.busy:
            self.busy -= 1
            return JSONResponse({"code": 429, "message": "too many sandboxes"}, 429, {"Should-Retry": "false"})
        body = await request.json()
        self.asked.append(body)
        id = f"vm{secrets.token_hex(6)}"
        self.boxes[id] = await Sandbox.create.aio(
            memory="256Mi", disk="64Mi", idle_timeout="1h", workdir="/start", backend="native", server=""
        )
        self.expire(id, body["timeout"])
        answer = {"sandboxID": id, "clientID": "c", "templateID": body["templateID"], "envdVersion": ENVD, "envdAccessToken": f"t-{id}"}
        return JSONResponse(answer, 201)

    async def listed(self, request: Request) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "no such key"}, 401)
        return JSONResponse([])

    async def kill(self, request: Request) -> Response:
        gone = await self.lose(request.path_params["id"])
        return Response(status_code=204) if gone else JSONResponse({"code": 404, "message": "no such sandbox"}, 404)

    async def timeout(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id not in self.boxes:
            return JSONResponse({"code": 404, "message": "no such sandbox"}, 404)
        self.expire(id, (await request.json())["timeout"])
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        return Response(status_code=204 if request.headers.get("e2b-sandbox-id") in self.boxes else 502)

    async def upload(self, request: Request) -> Response:
        id = request.headers["e2b-sandbox-id"]
        if request.headers.get("x-access-token") != f"t-{id}":
            return JSONResponse({"code": 401, "message": "no such token"}, 401)
        path, user = request.query_params["path"], request.query_params.get("username", "user")
        await self.boxes[id].write.aio(path, await request.body(), user=user)
        return JSONResponse([{"name": path.rpartition("/")[2], "path": path, "type": "file"}])

    def expire(self, id: str, seconds: float) -> None:
        if id in self.expiries:
            self.expiries[id].cancel()
        loop = asyncio.get_running_loop()
        self.expiries[id] = loop.call_later(seconds, lambda: loop.create_task(self.lose(id)))

    async def lose(self, id: str) -> bool:
        """A microVM is gone, whoever asked for that."""
        box = self.boxes.pop(id, None)
        if box is not None:
            self.expiries.pop(id).cancel()
            await box.terminate.aio()
        return box is not None

    async def start(self, request: StartRequest, ctx: Any) -> AsyncIterator[StartResponse]:
        id = ctx.request_headers.get("e2b-sandbox-id")
        box = self.boxes.get(id)
        if box is None or request.process is None:
            raise ConnectError(Code.UNAVAILABLE, "the sandbox was not found")
        user = "root" if ctx.request_headers.get("authorization", "").endswith("cm9vdDo=") else "user"
        argv = (request.process.cmd, *request.process.args)
        process = await box.exec.aio(*argv, stdin=PIPE if request.stdin else None, user=user, text=False, max_output=64 << 20)
        self.processes[id, process.id] = process
        yield _event(Oneof("start", ProcessEvent.StartEvent(pid=process.id)))
        pieces: asyncio.Queue[Any] = asyncio.Queue()

        async def move(field: Any, stream: Any) -> None:
            async for piece in stream:
                pieces.put_nowait(_event(Oneof("data", ProcessEvent.DataEvent(output=Oneof(field, piece)))))
            pieces.put_nowait(None)

        moving = [asyncio.create_task(move(*each)) for each in (("stdout", process.stdout), ("stderr", process.stderr))]
        left = len(moving)
        while left:
            piece = await pieces.get()
            left -= piece is None
            if piece is not None:
                yield piece
        try:
            code = await process.wait.aio()
        except ConnectionError:
            raise ConnectError(Code.UNAVAILABLE, "the connection to sandbox ended before the stream completed") from None
        yield _event(Oneof("end", ProcessEvent.EndEvent(exit_code=code, exited=True, status=f"exit status {code}")))

    async def send_input(self, request: Any, ctx: Any) -> SendInputResponse:
        if self.refuse_input:
            self.refuse_input -= 1
            raise ConnectError(Code.RESOURCE_EXHAUSTED, "too many requests")
        self.inputs += 1
        await self._process(request, ctx).stdin.write.aio(request.input.input.value)
        return SendInputResponse()

    async def close_stdin(self, request: Any, ctx: Any) -> CloseStdinResponse:
        await self._process(request, ctx).stdin.close.aio()
        return CloseStdinResponse()

    async def send_signal(self, request: Any, ctx: Any) -> SendSignalResponse:
        process = self._process(request, ctx)
        await (process.kill.aio() if request.signal == Signal.SIGKILL else process.send_signal.aio(15))
        return SendSignalResponse()

    def _process(self, request: Any, ctx: Any) -> Process:
        found = self.processes.get((ctx.request_headers.get("e2b-sandbox-id"), request.process.selector.value))
        if found is None:
            raise ConnectError(Code.NOT_FOUND, "no such process")
        return found


def _event(event: Any) -> StartResponse:
    return StartResponse(event=ProcessEvent(event=event))
