"""An environment with the tools of MCP servers beside its own. In: an environment and a manifest's servers. Out: an environment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import msgspec

from sandmill.config.manifest import McpSection
from sandmill.environments.environment import DIALOGUE, OPTIONAL, Environment, with_optional
from sandmill.environments.interaction import Interaction, Reaction, finishes_again, interactive, offer_of
from sandmill.environments.mcp.connections import Connections, Held
from sandmill.environments.mcp.server import McpServer
from sandmill.environments.task import Message, Submission, Task
from sandmill.environments.tools import Tool
from sandmill.environments.wrapped import WrappedEnvironment
from sandmill.errors import ConfigError, EnvironmentFailed


class EquippedEnvironment(WrappedEnvironment):
    """An environment with the tools of MCP servers beside its own. Made by `equipped`."""

    def __init__(self, environment: Environment, servers: Mapping[str, McpServer], tools: Sequence[tuple[str, Tool]]) -> None:
        super().__init__(environment)
        self.connections = Connections(servers)
        self._owners = {tool.name: owner for owner, tool in tools}
        own = offer_of(environment)
        self.offer = msgspec.structs.replace(own, tools=(*own.tools, *(tool for _, tool in tools)))
        definitions = json.dumps([tool.definition() for _, tool in tools])
        self._digest = hashlib.sha256(f"{environment.digest}\n{definitions}".encode()).hexdigest()

    @property
    def digest(self) -> str:
        return self._digest

    async def interact(self, task: Task, seed: int) -> Interaction:
        """The environment's own side, if it has one, with the servers beside it; each starts when it is first called."""
        own = interactive(self._inner)
        return _Equipped(self, None if own is None else await own.interact(task, seed))

    def owner_of(self, tool: str) -> str | None:
        """The server of a tool; None for the environment's own."""
        return self._owners.get(tool)

    async def close(self) -> None:
        """Ends the servers that episodes share. Idempotent."""
        await self.connections.close()
        if hasattr(self._inner, "close"):
            await self._inner.close()


class _Equipped:
    """One episode's side: the environment's own, and its connections."""

    def __init__(self, environment: EquippedEnvironment, own: Interaction | None) -> None:
        self._environment = environment
        self._own = own
        self._held = Held(environment.connections)

    @property
    def opening(self) -> tuple[Message, ...]:
        return () if self._own is None else self._own.opening

    @property
    def finishes_again(self) -> bool:
        return self._own is None or finishes_again(self._own)

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Reaction:
        owner = self._environment.owner_of(tool)
        if owner is None:
            if self._own is None:
                raise EnvironmentFailed(f"nobody serves tool {tool}")
            return await self._own.call(tool, arguments)
        return await (await self._held.connection(owner)).call(tool, arguments)

    async def reply(self, text: str) -> Reaction | None:
        return None if self._own is None else await self._own.reply(text)

    async def finish(self, submission: Submission) -> bytes:
        return b"" if self._own is None else await self._own.finish(submission)

    async def close(self) -> None:
        await self._held.close()
        if self._own is not None:
            await self._own.close()


async def equipped(environment: Environment, sections: Sequence[McpSection]) -> Environment:
    """The environment with the tools of these servers; each is started once to ask what it offers.

    Raises ConfigError (an unknown or a twice offered tool) and EnvironmentFailed (a server that does not start).
    """
    if not sections:
        return environment
    try:
        import mcp  # noqa: F401 - looked for before anything starts
    except ModuleNotFoundError as error:
        raise ConfigError("MCP tools need the mcp package: pip install 'sandmill[mcp]'", field="spec.tools.mcp") from error
    servers = {section.name: McpServer(section) for section in sections}
    taken = {tool.name: "the environment" for tool in offer_of(environment).tools}
    tools: list[tuple[str, Tool]] = []
    for name, server in servers.items():
        connection = await server.start()
        try:
            offered = await connection.tools()
        finally:
            await connection.close()
        tools += [(name, tool) for tool in _wanted(server.section, offered)]
    for name, tool in tools:
        if tool.name in taken:
            raise ConfigError(
                f"both {taken[tool.name]} and {name} offer a tool {tool.name!r}: leave it out of one by its list of tools",
                field="spec.tools.mcp",
            )
        taken[tool.name] = name
    others = ["grading_turn", "grade_group", *(member for member in OPTIONAL if member not in DIALOGUE)]
    return with_optional(EquippedEnvironment(environment, servers, tools), environment, others)


def _wanted(section: McpSection, offered: Sequence[Tool]) -> Sequence[Tool]:
    if section.tools is None:
        return offered
    known = {tool.name: tool for tool in offered}
    if missing := [name for name in section.tools if name not in known]:
        names = ", ".join(known) or "none"
        raise ConfigError(f"the MCP server {section.name} has no tool {missing[0]!r}; it has: {names}", field="spec.tools.mcp.tools")
    return [known[name] for name in section.tools]
