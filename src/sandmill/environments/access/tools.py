"""Tool servers for graders. In: a JSON-RPC message of the Model Context Protocol, over HTTP. Out: its answer, by one of the manifest.

A session of the protocol is the grading itself: nothing is kept between its requests but the server, which is this grading's own
unless the manifest shares it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sandmill.environments.mcp.connections import Connections, Held
from sandmill.errors import GraderFailed

if TYPE_CHECKING:
    from sandmill.environments.access.broker import Heard, Told

_PROTOCOL: Final = "2025-06-18"
_NO_METHOD, _NO_PARAMS = -32601, -32602


class Served:
    """The tool servers of one grading."""

    def __init__(self, servers: Connections) -> None:
        self._held = Held(servers)

    async def answer(self, name: str, heard: Heard) -> Told:
        """Raises GraderFailed for a server that was not given, EnvironmentFailed for one that is gone or does not answer."""
        from sandmill.environments.access.broker import Told

        if name not in self._held.names:
            given = ", ".join(sorted(self._held.names)) or "none"
            raise GraderFailed(f"the grader asked for the tool server {name[:80]!a}, which it was not given; it was given {given}")
        if heard.method != "POST":
            return Told(405, b"")  # no stream of the server's own, and no session to end
        try:
            message = msgspec.json.decode(heard.body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return Told(400, b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no JSON-RPC message"}}')
        if "id" not in message:
            return Told(202, b"")
        body = {"jsonrpc": "2.0", "id": message["id"], **await self._result(name, str(message.get("method")), message.get("params") or {})}
        return Told(200, msgspec.json.encode(body))

    async def _result(self, name: str, method: str, params: Any) -> dict[str, Any]:
        if method == "initialize":
            version = params.get("protocolVersion") if isinstance(params, dict) else None
            info = {"name": name, "version": "1"}
            return {"result": {"protocolVersion": version or _PROTOCOL, "capabilities": {"tools": {}}, "serverInfo": info}}
        if method == "ping":
            return {"result": {}}
        if method == "tools/list":
            tools = await (await self._held.connection(name)).tools()
            listed = [{"name": one.name, "description": one.description, "inputSchema": json.loads(one.parameters)} for one in tools]
            return {"result": {"tools": listed}}
        if method != "tools/call":
            return {"error": {"code": _NO_METHOD, "message": "there are tools/list and tools/call"}}
        tool, arguments = (params.get("name"), params.get("arguments") or {}) if isinstance(params, dict) else (None, None)
        if not isinstance(tool, str) or not isinstance(arguments, dict):
            return {"error": {"code": _NO_PARAMS, "message": "a call has a name, and arguments by their names"}}
        reaction = await (await self._held.connection(name)).call(tool, arguments)
        return {"result": {"content": [{"type": "text", "text": reaction.text}], "isError": not reaction.ok}}

    async def close(self) -> None:
        """Ends the servers that are this grading's own. Idempotent."""
        await self._held.close()
