"""Tools of MCP servers. In: a server's command or URL. Out: a connection that lists its tools and calls them.

A command runs in a sandbox of its own, without network unless the manifest gives it one: it is somebody else's program. What a server
says is data. A tool that reports an error is an answer to the model; a server that dies, hangs or breaks the protocol is a failure of
the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sandmill.config.manifest import EgressSection, McpSection
from sandmill.config.quantities import parse_bytes, parse_duration
from sandmill.environments.interaction import Reaction
from sandmill.environments.tools import Tool
from sandmill.environments.verdicts import reason_of
from sandmill.errors import EnvironmentFailed, SandboxError
from sandmill.sandboxes import PIPE, Egress, Process, Sandbox, SandboxSpec

if TYPE_CHECKING:
    from mcp import Client

_PAGES: Final = 100
_LONGEST_LINE: Final = 16 << 20
_UNREAD: Final = 64 << 20
_CLOSE_S: Final = 5.0
_SAID: Final = 400


class McpServer:
    """One server of a manifest. `start` opens a connection, with a server of its own where it is a command."""

    def __init__(self, section: McpSection) -> None:
        self.section = section
        self.timeout_s = parse_duration(section.timeout, field="spec.tools.mcp.timeout")
        self._spec = SandboxSpec(
            memory_bytes=parse_bytes(section.memory, field="spec.tools.mcp.memory"),
            network=Egress.of(EgressSection() if section.network is None else section.network.egress),
            env=dict(section.env),
            image=section.image,
        )

    async def start(self) -> Connection:
        """A connection that answers. Raises EnvironmentFailed."""
        connection = Connection(self)
        try:
            async with asyncio.timeout(self.timeout_s):
                await connection.open()
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                said = f"it did not answer within {self.timeout_s:g} s"
            elif isinstance(error, Exception):
                said = reason_of(_innermost(error))
            else:
                raise
            told = f"; it wrote: {connection.last_words}" if connection.last_words else ""
            place = self.section.command[0] if self.section.command else self.section.url
            raise EnvironmentFailed(f"the MCP server {self.section.name} ({place}) could not be started: {said}{told}") from error
        return connection

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """Where its command runs."""
        sandbox = await Sandbox.from_spec.aio(self._spec, name=f"mcp-{self.section.name}", server="")
        try:
            yield sandbox
        finally:
            await sandbox.terminate.aio()


class Connection:
    """A live conversation with one server. A task of its own holds it, since it must end where it began."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._silent = False
        self.last_words = ""

    @property
    def alive(self) -> bool:
        """False once it has ended by itself or was closed."""
        return self._holder is not None and not self._holder.done() and not self._silent and not self._over.is_set()

    async def open(self) -> None:
        """Returns once the server has answered."""
        self._holder = asyncio.create_task(self._hold())
        await asyncio.shield(self._ready)

    async def tools(self) -> tuple[Tool, ...]:
        """What it offers. Raises EnvironmentFailed when it does not say so in time, or for what is no tool."""
        client, found, cursor = await self._ready, [], None
        try:
            async with asyncio.timeout(self._server.timeout_s):
                for _ in range(_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
            return tuple(
                Tool(name=tool.name, description=tool.description or "", parameters=json.dumps(tool.input_schema)) for tool in found
            )
        except Exception as error:
            said = f"no answer within {self._server.timeout_s:g} s" if isinstance(error, TimeoutError) else reason_of(_innermost(error))
            raise EnvironmentFailed(f"the MCP server {self._server.section.name} did not say which tools it has: {said}") from error

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Reaction:
        """Raises EnvironmentFailed when the server is gone, does not answer in time, or says what is no result."""
        name = self._server.section.name
        if not self.alive or self._holder is None:
            raise EnvironmentFailed(f"the MCP server {name} ended")
        asked = asyncio.ensure_future(self._ask(tool, arguments))
        try:
            async with asyncio.timeout(self._server.timeout_s):
                await asyncio.wait([asked, self._holder], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise EnvironmentFailed(f"the MCP server {name} ended during a call of {tool}")
            return asked.result()
        except TimeoutError as error:
            raise EnvironmentFailed(f"the MCP server {name} did not answer a call of {tool} within {self._server.timeout_s:g} s") from error
        finally:
            asked.cancel()

    async def _ask(self, tool: str, arguments: Mapping[str, object]) -> Reaction:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await self._ready
        try:
            result = await client.call_tool(tool, dict(arguments))
        except MCPError as error:
            if self._silent or (self._server.section.url is not None and error.code == CONNECTION_CLOSED):
                raise EnvironmentFailed(f"the MCP server {self._server.section.name} ended during a call of {tool}") from error
            return Reaction(text=f"error: {reason_of(error)}", ok=False)
        except Exception as error:
            said = reason_of(_innermost(error))
            raise EnvironmentFailed(f"the MCP server {self._server.section.name} gave no result to a call of {tool}: {said}") from error
        return Reaction(text="\n".join(_shown(block) for block in result.content), ok=not result.is_error)

    async def close(self) -> None:
        """Ends it, and its server where that is a command. Idempotent."""
        self._over.set()
        if self._holder is not None:
            _, late = await asyncio.wait([self._holder], timeout=_CLOSE_S)
            if late:
                self._holder.cancel()
                await asyncio.wait([self._holder])
        if self._ready.done():
            self._ready.exception()  # whoever waited for it has been told, or waits no more

    async def _hold(self) -> None:
        from mcp import Client

        section = self._server.section
        try:
            async with contextlib.AsyncExitStack() as stack:
                target: Any = section.url
                if section.command:
                    sandbox = await stack.enter_async_context(self._server.sandbox())
                    target = await self._command(sandbox, stack)
                client = await stack.enter_async_context(Client(target))
                self._ready.set_result(client)
                await self._over.wait()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for it
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _command(self, sandbox: Sandbox, stack: contextlib.AsyncExitStack) -> Any:
        process = await sandbox.exec.aio(*self._server.section.command, stdin=PIPE, text=False, max_output=_UNREAD)
        listening = asyncio.create_task(self._listen(process))
        stack.callback(listening.cancel)
        return _transport(process, self._end)

    def _end(self) -> None:
        """Its standard output ended."""
        self._silent = True

    async def _listen(self, process: Process) -> None:
        """The end of what it writes to its standard error, for a person to read when it fails."""
        async for piece in process.stderr:
            assert isinstance(piece, bytes)
            self.last_words = (self.last_words + piece.decode("utf-8", "replace"))[-_SAID:]


@contextlib.asynccontextmanager
async def _transport(process: Process, ended: Callable[[], None]) -> AsyncIterator[Any]:
    """A process's pipes as the streams of messages that an MCP client takes: one JSON text a line."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    to_client, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, from_client = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        pending = b""
        async with to_client:
            async for piece in process.stdout:
                assert isinstance(piece, bytes)
                *lines, pending = (pending + piece).split(b"\n")
                if len(pending) > _LONGEST_LINE:
                    return
                for line in lines:
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError:
                        continue  # a server that also prints for people
                    await to_client.send(message)
            ended()

    async def write() -> None:
        async with from_client:
            async for message in from_client:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.stdin.write.aio(text.encode() + b"\n")

    async with anyio.create_task_group() as group:
        for work in (read, write):
            group.start_soon(_quietly, work)
        try:
            yield incoming, outgoing
        finally:
            group.cancel_scope.cancel()
            for stream in (to_client, incoming, outgoing, from_client):
                stream.close()


async def _quietly(work: Any) -> None:
    """A pipe that breaks closes its stream, which is how the client learns of it."""
    import anyio

    with contextlib.suppress(SandboxError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        await work()


def _shown(block: Any) -> str:
    """A piece of a result as text; what is not text is named."""
    return str(block.text) if block.type == "text" else f"[{block.type}]"


def _innermost(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
