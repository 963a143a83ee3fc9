"""Tools of MCP servers: in a sandbox of their own, or at a URL; what they answer, and every way in which they break."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandmill.config.load import parse_manifest
from sandmill.config.manifest import EnvironmentSection, McpSection
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.environment import Environment
from sandmill.environments.interaction import Interaction, interactive, offer_of
from sandmill.environments.mcp.equipped import equipped
from sandmill.errors import ConfigError, EnvironmentFailed
from sandmill.sandboxes import list_sandboxes, loop

ABACUS = Path(__file__).with_name("abacus.py").read_text()


def abacus(*arguments: str, **options: Any) -> McpSection:
    return McpSection(**{"name": "abacus", "command": ("python3", "-c", ABACUS, *arguments), "timeout": "10s", **options})


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, 60), loop()).result()


def shell() -> ShellEnvironment:
    return ShellEnvironment(EnvironmentSection(name="shell@1.0.0", train_tasks=8, held_out_tasks=8))


def played(sections: list[McpSection], play: Callable[[Interaction], Coroutine[Any, Any, Any]]) -> Any:
    """What `play` gives with one episode's side of a shell environment that has these servers' tools."""

    async def go() -> Any:
        environment = await equipped(shell(), sections)
        side = await began(environment)
        try:
            return await play(side)
        finally:
            await side.close()
            await environment.close()  # type: ignore[attr-defined]

    result = run(go())
    assert [box for box in list_sandboxes() if box.name.startswith("mcp-")] == []
    return result


async def began(environment: Environment) -> Interaction:
    own = interactive(environment)
    assert own is not None
    return await own.interact(environment.splits["train"][0], 0)


def test_its_tools_stand_beside_bash_and_change_the_digest() -> None:
    inner = shell()
    made = run(equipped(inner, [abacus(tools=("add", "total"))]))
    assert [tool.name for tool in offer_of(made).tools] == ["bash", "add", "total"]
    assert made.digest != inner.digest
    assert made.digest == run(equipped(shell(), [abacus(tools=("add", "total"))])).digest
    assert next(made.demonstrations(0)) == next(inner.demonstrations(0))


def test_each_episode_has_a_server_of_its_own_unless_it_is_shared() -> None:
    async def totals(section: McpSection) -> list[str]:
        environment = await equipped(shell(), [section])
        sides = [await began(environment) for _ in range(2)]
        try:
            for side in sides:
                assert (await side.call("add", {"a": 2, "b": 3})).text == "5"
            return [(await side.call("total", {})).text for side in sides]
        finally:
            for side in sides:
                await side.close()
            await environment.close()  # type: ignore[attr-defined]

    assert run(totals(abacus())) == ["5", "5"]
    assert run(totals(abacus(shared=True))) == ["10", "10"]
    assert [box for box in list_sandboxes() if box.name.startswith("mcp-")] == []


@pytest.mark.parametrize(("how", "told"), [("error", "no such file"), ("refuse", "error: ")])
def test_an_error_of_a_tool_goes_back_to_the_model(how: str, told: str) -> None:
    async def play(side: Interaction) -> None:
        reaction = await side.call("misbehave", {"how": how})
        assert not reaction.ok
        assert told in reaction.text
        assert "\x1b" not in reaction.text
        assert (await side.call("total", {})).text == "0"

    played([abacus()], play)


@pytest.mark.parametrize(
    ("how", "said"),
    [("die", "ended during a call"), ("hang", "did not answer a call of misbehave within 2 s"), ("nonsense", "gave no result")],
)
def test_a_server_that_breaks_is_a_failure_of_the_environment(how: str, said: str) -> None:
    async def play(side: Interaction) -> None:
        with pytest.raises(EnvironmentFailed, match=said):
            await side.call("misbehave", {"how": how})

    played([abacus(timeout="2s")], play)


def test_a_shared_server_that_died_is_started_again_for_the_next_episode() -> None:
    async def go() -> str:
        environment = await equipped(shell(), [abacus(shared=True)])
        try:
            first, second = await began(environment), await began(environment)
            with pytest.raises(EnvironmentFailed, match="ended"):
                await first.call("misbehave", {"how": "die"})
            return (await second.call("total", {})).text
        finally:
            await environment.close()  # type: ignore[attr-defined]

    assert run(go()) == "0"
    assert [box for box in list_sandboxes() if box.name.startswith("mcp-")] == []


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (abacus("dies"), "cannot find my settings"),
        (abacus("hangs", timeout="1s"), "did not answer within 1 s"),
        (abacus("mute", timeout="2s"), "did not say which tools it has: no answer within 2 s"),
        (McpSection(name="x", command=("no-such-program",), timeout="5s"), "no-such-program"),
        (McpSection(name="x", url="http://127.0.0.1:9/mcp", timeout="5s"), "MCP server x .* could not be started"),
    ],
)
def test_a_server_that_does_not_start_is_named_before_anything_is_sampled(section: McpSection, said: str) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        run(equipped(shell(), [section]))
    assert [box for box in list_sandboxes() if box.name.startswith("mcp-")] == []


def test_unknown_and_twice_offered_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tool 'ad'; it has: add, total, misbehave"):
        run(equipped(shell(), [abacus(tools=("ad",))]))
    with pytest.raises(ConfigError, match="both abacus and other offer a tool 'add'"):
        run(equipped(shell(), [abacus(), abacus(name="other")]))


def test_a_command_has_no_network_and_none_of_the_hosts_files() -> None:
    look = 'text": repr((os.listdir("/sys"), os.path.exists("/etc/shadow"), len(open("/proc/net/dev").readlines()) - 2))'
    probe = ABACUS.replace('text": str(total)', look)

    async def play(side: Interaction) -> str:
        return (await side.call("total", {})).text

    assert played([McpSection(name="probe", command=("python3", "-c", probe), timeout="10s")], play) == "([], False, 1)"


@pytest.fixture
def http_server() -> Iterator[str]:
    """A server of the published package, over HTTP."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("words")

    @server.tool()
    def shout(text: str) -> str:
        return text.upper()

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(server.streamable_http_app(), log_level="error", lifespan="on")
        serving = uvicorn.Server(config)
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        serving.should_exit = True
        thread.join(20)


def test_a_server_at_a_url_is_spoken_to_over_http(http_server: str) -> None:
    async def play(side: Interaction) -> None:
        assert (await side.call("shout", {"text": "hey"})).text == "HEY"
        reaction = await side.call("shout", {"wrong": 1})
        assert not reaction.ok

    played([McpSection(name="words", url=http_server, timeout="10s")], play)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("{name: a b, command: [x]}", "mcp[0].name"),
        ("{name: a}", "either a command or a url"),
        ("{name: a, command: [x], url: 'http://x'}", "either a command or a url"),
        ("{name: a, url: 'ftp://x'}", "http:// or https://"),
        ("{name: a, command: [x], timeout: soon}", "mcp[0].timeout"),
        ("{name: a, comand: [x]}", "did you mean 'command'"),
        ("{name: a, command: [x], network: {egress: {policy: AllowList}}}", "mcp[0].network.egress"),
    ],
)
def test_a_manifests_mistakes_are_named_with_their_place(server: str, said: str) -> None:
    text = f"spec:\n  model: {{uri: sandmill/tiny-shell}}\n  environment: {{name: shell@1.0.0}}\n  tools:\n    mcp:\n      - {server}\n"
    with pytest.raises(ConfigError) as refused:
        parse_manifest(text.encode())
    assert said in str(refused.value)
    assert refused.value.line == 6
