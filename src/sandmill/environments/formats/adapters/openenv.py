"""Speaks to an OpenEnv server: one that it starts itself, beside it in the sandbox, or one of the user's at a URL.

An action that the server does not take, or that its environment raises at while it carries it out (EXECUTION_ERROR), is the action's fault:
the session goes on, the step did not count, and what was said goes back to the model. All else that goes wrong is the server's: a reset
that fails, any other code, a connection that ends, a tool whose transport broke.

A server in the sandbox is never started where its application is loaded: each episode's process starts its own, on a socket of its own,
so that episodes share no state, and a server that takes one session at a time is no limit. The wire is OpenEnv's WebSocket.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import json
import os
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

LONGEST_BYTES = 16 << 20
_START_S = 120.0
_HTTP_S = 60.0
_SOCKET = "server.sock"
_MANY = ("CAPACITY_REACHED", "it plays as many episodes as it takes at once; raise max_concurrent_envs, or lower options.sessions")


class Broken(Exception):
    """The server answered with an error that is not the action's."""


class Wire:
    """One episode's connection. Messages are JSON objects with `type` and `data`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.forgiving = False
        """Whether a step that the environment raises in has a wrong action."""

    async def ask(self, kind: str, data: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The server's data, or None and what is wrong with what was asked. Raises Broken, and what the connection raises."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a server that is full says so and hangs up: what it said is still to be read
            await self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._connection.recv())
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise Broken(f"the server answered {str(answer)[:80]!a}, which is no message")
        if answer.get("type") != "error":
            return found, ""
        code, said = str(found.get("code")), str(found.get("message"))
        if code == "VALIDATION_ERROR" or (code == "EXECUTION_ERROR" and kind == "step" and self.forgiving):
            return None, "; ".join([said, *(wrong(one) for one in found.get("errors") or [])])
        raise Broken(f"the server answered {code}: {_MANY[1] if code == _MANY[0] else said}")

    async def close(self) -> None:
        """Says goodbye."""
        await self._connection.close()


class OwnServer:
    """An ASGI application, served by this process on a socket in its folder."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._path = ""

    async def connect(self) -> Wire:
        """A connection, to the server that is started for the first."""
        from websockets.asyncio.client import unix_connect

        self._started()
        return Wire(await unix_connect(self._path, "ws://localhost/ws", ping_interval=None, max_size=LONGEST_BYTES, open_timeout=_HTTP_S))

    async def get(self, place: str, data: Any = None) -> Any:
        """See `fetch`."""
        self._started()
        line = http.client.HTTPConnection("localhost", timeout=_HTTP_S)
        line.sock = socket.socket(socket.AF_UNIX)
        line.sock.settimeout(_HTTP_S)
        line.sock.connect(self._path)
        return fetch(line, place, data)

    def _started(self) -> None:
        if self._path:
            return
        import uvicorn

        self._path = os.path.abspath(_SOCKET)
        config = uvicorn.Config(self._app, uds=self._path, log_level="critical", ws_ping_interval=None, ws_max_size=LONGEST_BYTES)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + _START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise Broken("the server did not start")
            time.sleep(0.002)


class RemoteServer:
    """A server at a ws:// or wss:// URL."""

    def __init__(self, url: str) -> None:
        self._url = urllib.parse.urlsplit(url)

    def __str__(self) -> str:
        return self._url.netloc

    async def connect(self) -> Wire:
        """A connection of its own."""
        from websockets.asyncio.client import connect

        place = f"{self._url.scheme}://{self._url.netloc}{self._url.path.rstrip('/')}/ws"
        return Wire(await connect(place, ping_interval=None, max_size=LONGEST_BYTES, open_timeout=_HTTP_S, proxy=None))

    async def get(self, place: str, data: Any = None) -> Any:
        """See `fetch`."""
        kind = http.client.HTTPSConnection if self._url.scheme == "wss" else http.client.HTTPConnection
        assert self._url.hostname is not None
        line = kind(self._url.hostname, self._url.port, timeout=_HTTP_S)
        return await asyncio.to_thread(fetch, line, self._url.path.rstrip("/") + place, data)


class OpenEnv:
    """The environment behind a server; in an episode's process also the episode."""

    def __init__(self, server: OwnServer | RemoteServer, options: dict[str, Any]) -> None:
        self.server, self.options = server, options
        self.seeds, self.arguments = options["seeds"], options["arguments"]
        self.wire: Wire | None = None
        self.field, self.tools = "", {}  # type: tuple[str, dict[str, dict[str, Any]]]
        self.splits: dict[str, int] = {}
        self.rewards: list[float] = []
        self.steps, self.refused, self.over = 0, 0, False

    def episode(self, server: OwnServer | RemoteServer) -> OpenEnv:
        """One to play an episode with, which knows what this one learned."""
        other = OpenEnv(server, self.options)
        other.field, other.tools, other.splits = self.field, self.tools, self.splits
        return other

    async def describe(self) -> dict[str, Any]:
        """See protocol.Description."""
        about = await self.server.get("/metadata") or {}
        schemas = await self.server.get("/schema")
        if not isinstance(schemas, dict) or not isinstance(schemas.get("action"), dict):
            raise Broken("it has no /schema: an OpenEnv server has had one since 0.2")
        await self._learn(schemas["action"], str(about.get("description") or ""))
        name = str(about.get("name") or self.options["name"])
        self.splits = await self._splits()
        return {
            "name": name,
            "version": str(about.get("version") or ""),
            "splits": self.splits or {"train": None, "heldout": None},
            "reward": "the sum of its steps' rewards",
            "multi_turn": True,
            "tools": [json.dumps(tool) for tool in self.tools.values()],
            "sessions": self.options["sessions"],
        }

    async def _learn(self, schema: dict[str, Any], about: str) -> None:
        """How the model acts: by saying something where an action is one text, by tools otherwise."""
        fields = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
        if "tool_name" in fields and "arguments" in fields:
            for tool in await self._listed():
                self.tools[str(tool["name"])] = function(tool["name"], tool.get("description"), tool.get("input_schema"))
            return
        needed = [name for name in schema.get("required", []) if name != "metadata"]
        texts = [name for name in needed if fields.get(name, {}).get("type") == "string" and not fields[name].get("enum")]
        wanted = self.options["act"]
        if wanted != "tool" and len(texts) == 1 == len(needed):
            self.field = texts[0]
            return
        if wanted == "text":
            raise Broken(f"an action of it is no single text but {', '.join(fields) or 'nothing'}: set options.act to tool")
        parameters = {
            **{key: value for key, value in schema.items() if key in ("$defs", "required")},
            "type": "object",
            "properties": fields,
        }
        parameters["required"] = needed
        self.tools["step"] = function("step", schema.get("description") or about, parameters)

    async def _listed(self) -> list[dict[str, Any]]:
        wire = await self.server.connect()
        try:
            await wire.ask("reset", {})
            found, wrong = await wire.ask("step", {"type": "list_tools"})
        finally:
            await wire.close()
        tools = ((found or {}).get("observation") or {}).get("tools")
        if not isinstance(tools, list) or not tools:
            raise Broken(f"it lists no tools: {wrong or str(found)[:200]}")
        return tools

    async def _splits(self) -> dict[str, int]:
        """Tasks by split, where the server has a task API."""
        served = await self.server.get("/list_environments")
        if not isinstance(served, list) or len(served) != 1:
            return {}
        place = f"/{urllib.parse.quote(str(served[0]), safe='')}"
        found = await self.server.get(f"{place}/splits")
        if not isinstance(found, list):
            return {}
        names = [str(one.get("name") if isinstance(one, dict) else one) for one in found]
        counts = {one: await self.server.get(f"{place}/num_tasks", {"split": one}) for one in names}
        return {one: int(count["num_tasks"]) for one, count in counts.items() if isinstance(count, dict) and "num_tasks" in count}

    async def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row. A task is what its reset is given; without a task API that is a seed."""
        wire = await self.server.connect()
        try:
            return [await self._row(wire, split, number) for number in range(start, stop)]
        finally:
            await wire.close()

    async def _row(self, wire: Wire, split: str, number: int) -> dict[str, Any]:
        if self.splits:
            row, identity = {"split": split, "index": number, "seed": 0}, f"{split} {number}"
        else:
            row, identity = {"seed": self.seeds[split] + number}, f"seed {self.seeds[split] + number}"
        observation = await self._reset(wire, row)
        return {"prompt": self._shown(observation, first=True), "identity": identity, "row": row}

    async def _reset(self, wire: Wire, row: dict[str, Any]) -> dict[str, Any]:
        answer, wrong = await wire.ask("reset", {**self.arguments, **row})
        if answer is None:
            raise Broken(f"the server refuses a reset with {json.dumps(row)}: {wrong}")
        return answer

    async def open(self, row: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Opened."""
        self.wire = await self.server.connect()
        self.wire.forgiving = self.options["step_errors"] == "action"
        return {"prompt": self._shown(await self._reset(self.wire, row), first=True)}

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A tool. See protocol.Step."""
        if tool == "step" and "step" in self.tools:
            return await self._step(arguments)
        return await self._step({"type": "call_tool", "tool_name": tool, "arguments": arguments})

    async def reply(self, text: str) -> dict[str, Any]:
        """A text is an action or, where actions are tools, the end. See protocol.Step."""
        return await self._step({self.field: text}) if self.field else {"observation": "", "done": True}

    async def _step(self, action: dict[str, Any]) -> dict[str, Any]:
        assert self.wire is not None
        answer, wrong = await self.wire.ask("step", action)
        if answer is None:
            self.refused += 1
            return {"observation": wrong, "ok": False}
        self.steps += 1
        reward = answer.get("reward")
        if reward is not None:
            if not isinstance(reward, (int, float)):
                raise Broken(f"the reward of a step is {str(reward)[:80]!a}, not a number")
            self.rewards.append(float(reward))
        self.over = answer.get("done") is True
        seen = answer.get("observation") or {}
        result = seen.get("result")
        error = seen.get("error")
        if isinstance(error, dict) and error.get("error_type") == "transport_error":
            raise Broken(f"the server could not reach its tool: {str(error.get('message'))[:200]}")
        failed = error or (isinstance(result, dict) and result.get("is_error"))
        return {"observation": self._shown(answer), "done": self.over, "reward": reward, "ok": not failed}

    def _shown(self, answer: dict[str, Any], first: bool = False) -> str:
        """What the model sees of an observation: its one text, or all of it as JSON."""
        whole = answer.get("observation") or {}
        fields = {name: value for name, value in whole.items() if name != "metadata" and value not in (None, "", [], {})}
        result = fields.get("result")
        if isinstance(result, dict) and "content" in result:
            fields = {"content": "\n".join(str(part.get("text", part)) for part in result["content"] or [])}
        texts = list(fields.values())
        text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(fields, ensure_ascii=False)
        return f"{self.options['instructions']}\n\n{text}" if first and self.options["instructions"] else text

    async def finish(self, answer: str | None, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """See protocol.Score. An episode in which no step gave a reward has none, unless it was cut short."""
        if self.wire is not None:
            await self.wire.close()
        parts = {"steps": float(self.steps), "refused": float(self.refused)}
        if self.rewards:
            return {"reward": sum(self.rewards), "parts": parts}
        if self.over:
            raise Broken("the episode is done and no step of it gave a reward")
        return {"reward": self.options["unfinished"], "parts": parts, "answered": False}


def fetch(line: http.client.HTTPConnection, place: str, data: Any) -> Any:
    """GET, or POST of JSON; None where the server has no such thing."""
    try:
        body = None if data is None else json.dumps(data)
        line.request("GET" if data is None else "POST", place, body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        content = answer.read(LONGEST_BYTES)
        if answer.status in (404, 405, 501):
            return None
        if answer.status != 200:
            raise Broken(f"GET {place} answered {answer.status}: {content[:200].decode('utf-8', 'replace')}")
        return json.loads(content)
    finally:
        line.close()


def function(name: Any, about: Any, parameters: Any) -> dict[str, Any]:
    """A function definition."""
    described = {"name": str(name), "description": str(about or ""), "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": described}


def wrong(one: Any) -> str:
    """One of a validation's complaints."""
    if not isinstance(one, dict):
        return str(one)[:200]
    return f"{'.'.join(map(str, one.get('loc') or []))}: {one.get('msg')}"


def apart(work: Callable[[], Any]) -> Any:
    """The result of `work`, done in a process of its own: a server that was started here could not be started again after a fork."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.makedirs(f"/tmp/{os.getpid()}")
            os.chdir(f"/tmp/{os.getpid()}")
            said = {"found": work()}
        except BaseException as error:  # noqa: BLE001 - it is told to whoever loads
            said = {"broken": f"{type(error).__name__}: {error}"}
        with os.fdopen(writer, "wb") as file:
            file.write(json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    told = json.loads(data or b'{"broken": "its process ended before it had described itself"}')
    if "broken" in told:
        raise Broken(told["broken"])
    return told["found"]


class Served(OpenEnv):
    """An application in this sandbox."""

    def describe(self) -> dict[str, Any]:  # type: ignore[override]
        """See protocol.Description."""
        found, learned = apart(lambda: asyncio.run(self._described()))
        self.field, self.tools, self.splits = learned
        return dict(found)

    async def _described(self) -> tuple[dict[str, Any], tuple[Any, ...]]:
        return await OpenEnv.describe(self), (self.field, self.tools, self.splits)


def load(options: dict[str, Any]) -> Served:
    """The application that `options` name, imported: `module:object` below a folder, or installed."""
    os.environ.setdefault("ENABLE_WEB_INTERFACE", "false")
    if options["folder"]:
        sys.path.insert(0, options["folder"])
    module, _, name = options["app"].partition(":")
    return Served(OwnServer(getattr(importlib.import_module(module), name or "app")), options)
