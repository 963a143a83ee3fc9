"""What a manifest lets graders use, made ready. In: its `grading` section and its tool servers. Out: a network policy and a broker."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sandmill.accounts.prices import TokenPrices
from sandmill.config.manifest import GradingSection, JudgeSection, ToolsSection
from sandmill.config.quantities import parse_duration, parse_usd
from sandmill.environments.access.broker import Broker, Terms
from sandmill.environments.access.judge import Endpoint, Judge, key_of
from sandmill.environments.mcp.connections import Connections
from sandmill.environments.mcp.server import McpServer
from sandmill.errors import ConfigError
from sandmill.sandboxes import Egress
from sandmill.sandboxes.spec import EgressMode

PORT: Final = 8399
"""Of the broker, on the loopback of the sandbox that graders run in."""
NO_NETWORK: Final = Egress.deny()
Served = Callable[[JudgeSection], Judge]
"""Makes a judge of a model that is served here."""


@dataclass(frozen=True)
class Access:
    """What graders may use: nothing, by default."""

    network: Egress = NO_NETWORK
    broker: Broker | None = None

    @property
    def anything(self) -> bool:
        """Whether graders may use anything at all."""
        return self != NOTHING

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables by which a grader finds it. OpenAI's clients read theirs by themselves."""
        if self.broker is None:
            return {}
        found = {"SANDMILL_DOOR": str(PORT)}
        here = f"http://127.0.0.1:{PORT}"
        if self.broker.judges:
            found |= {"OPENAI_BASE_URL": f"{here}/v1", "OPENAI_API_KEY": "none", "SANDMILL_JUDGE_MODEL": next(iter(self.broker.judges))}
        return found | {f"SANDMILL_MCP_{_variable(name)}": f"{here}/mcp/{name}" for name in self.broker.tools.servers}

    def lacks(self, uses: Iterable[str]) -> str | None:
        """The first of what graders cannot do without (see `Description.uses`) that they may not use."""
        network = ["network"] if self.network.mode is not EgressMode.DENY else []
        judges, servers = ([], []) if self.broker is None else (list(self.broker.judges), list(self.broker.tools.servers))
        given = {*network, *(["judge"] if judges else []), *(f"judge:{name}" for name in judges), *(f"mcp:{name}" for name in servers)}
        return next((use for use in uses if use not in given), None)

    async def close(self) -> None:
        """Ends the judges and the tool servers. Idempotent."""
        if self.broker is not None:
            await self.broker.close()


NOTHING: Final = Access()


def access_of(grading: GradingSection, tools: ToolsSection, served: Served) -> Access:
    """Starts nothing. Raises ConfigError for a key that is not there, or an identity that graders cannot be told apart by."""
    network = Egress() if grading.network is None else Egress.of(grading.network.egress)
    if not grading.judge and not grading.mcp:
        return Access(network)
    field = "spec.grading.judge" if grading.judge else "spec.grading.mcp"
    if os.geteuid() != 0:
        raise ConfigError(
            "graders that ask something are told apart by their users, which only root can give them: run as root", field=field
        )
    judges = {one.name: (_judge(one, place, served), _terms(one)) for place, one in enumerate(grading.judge)}
    if grading.mcp:
        _needs("mcp", "a tool server", "mcp", "spec.grading.mcp")
    servers = {one.name: McpServer(one) for one in tools.mcp if one.name in grading.mcp}
    return Access(network, Broker(judges, Connections(servers), at_once=grading.max_parallel))


def _judge(section: JudgeSection, place: int, served: Served) -> Judge:
    if section.url is None:
        return served(section)
    _needs("httpx", "a judge at a URL", "train", "spec.grading.judge")
    key = key_of(section.key, f"spec.grading.judge[{place}].key")
    return Endpoint(section.url, section.model or section.name, key, retries=section.retries)


def _needs(module: str, what: str, extra: str, field: str) -> None:
    """Looked for before anything starts."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what} needs the package {module}: pip install 'sandmill[{extra}]'", field=field)


def _terms(section: JudgeSection) -> Terms:
    given = {"input": section.prices.input, "output": section.prices.output}
    prices = {bucket: None if text is None else parse_usd(text) for bucket, text in given.items()}
    return Terms(
        max_requests=section.max_requests,
        max_tokens=section.max_tokens,
        max_cost_microusd=None if section.max_cost_usd is None else parse_usd(section.max_cost_usd),
        timeout_s=parse_duration(section.timeout),
        prices=TokenPrices(**prices) if section.url is not None else TokenPrices(input=0, output=0),
    )


def _variable(name: str) -> str:
    return re.sub("[^A-Z0-9]", "_", name.upper())


__all__ = ["NOTHING", "PORT", "Access", "access_of"]
