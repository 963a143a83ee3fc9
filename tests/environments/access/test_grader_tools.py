"""A grader uses the tool servers that it was given by name, over MCP, and no other; one that breaks leaves no verdict."""

import asyncio
from pathlib import Path

import pytest

from sandmill.config.manifest import McpSection, ToolsSection
from sandmill.environments.access.broker import Heard
from sandmill.environments.access.meter import Meter
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure
from sandmill.sandboxes import list_sandboxes, loop

ABACUS = (Path(__file__).parents[1] / "mcp" / "abacus.py").read_text()
MODULE = """
def rpc(method, params={}, server="abacus"):
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return json.loads(post("", body, base=os.environ["SANDMILL_MCP_ABACUS"].replace("abacus", server)))

def use(tool, **arguments):
    return rpc("tools/call", {"name": tool, "arguments": arguments})["result"]
"""


@pytest.fixture
def abacus(allowed):
    def make(mcp=("abacus",), **options):
        server = McpSection(**{"name": "abacus", "command": ("python3", "-c", ABACUS), "timeout": "3s", "tools": (), **options})
        return allowed(tools=ToolsSection(mcp=(server,)), mcp=mcp)

    return make


def test_a_grader_speaks_to_a_server_of_its_own(abacus, graded):
    body = """
    version = rpc("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}})
    assert version["result"]["protocolVersion"] == "2025-06-18"
    assert post("", {"jsonrpc": "2.0", "method": "notifications/initialized"}, base=os.environ["SANDMILL_MCP_ABACUS"]) == ""
    assert [tool["name"] for tool in rpc("tools/list")["result"]["tools"]] == ["add", "total", "misbehave"]
    assert rpc("prompts/list")["error"]["code"] == -32601
    assert use("misbehave", how="error") == {"content": [{"type": "text", "text": "no such file"}], "isError": True}
    use("add", a=2, b=3)
    return float(use("total")["content"][0]["text"])
    """
    verdicts = [verdict for verdict, _ in graded(body, ["x", "x"], abacus(), module=MODULE)]
    assert verdicts == [Graded(reward=5.0, passed=True)] * 2
    shared = [verdict.reward for verdict, _ in graded(body, ["x", "x"], abacus(shared=True), module=MODULE)]
    assert shared == [5.0, 10.0]
    assert [box for box in list_sandboxes() if box.name.startswith("mcp-")] == []


BREAKS = {"die": "ended during a call", "hang": "did not answer a call of misbehave within 3 s", "nonsense": "gave no result"}


@pytest.mark.parametrize("how", list(BREAKS))
def test_a_server_that_breaks_is_a_failure_of_its_own_even_where_the_grader_catches_it(abacus, graded, how):
    body = "try:\n    use('misbehave', how=completion)\nexcept Exception:\n    pass\nreturn 1.0"
    [(verdict, _)] = graded(body, [how], abacus(), module=MODULE)
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.retryable) == (Boundary.MCP, True)
    assert BREAKS[how] in verdict.reason


def test_a_server_that_was_not_given_is_not_there(abacus, graded):
    body = "try:\n    rpc('tools/list', server='other')\nexcept Exception:\n    pass\nreturn 1.0"
    [(verdict, _)] = graded(body, ["x"], abacus(), module=MODULE, retries=1)
    assert verdict == InfrastructureFailure(
        boundary=Boundary.MCP,
        reason="the grader asked for the tool server 'other', which it was not given; it was given abacus",
        retryable=False,
    )


def test_the_protocols_own_client_understands_it(abacus):
    """Over the same answers as a grader gets, carried by a server of the test's own."""
    import mcp

    async def main():
        access = abacus()
        asker = access.broker.asker(Meter())

        async def serve(reader, writer):
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                size = 0
                while (field := await reader.readline()).strip():
                    name, _, value = field.decode().partition(":")
                    size = int(value) if name.lower() == "content-length" else size
                told = asyncio.get_running_loop().create_future()
                asker.hear(Heard(method=method, path=path, body=await reader.readexactly(size)), told.set_result)
                status, body, kind = await told
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            async with mcp.Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp/abacus") as client:
                names = [tool.name for tool in (await client.list_tools()).tools]
                result = await client.call_tool("add", {"a": 2, "b": 3})
                return names, [block.text for block in result.content]
        finally:
            server.close()
            await asker.close()
            await access.close()

    found = asyncio.run_coroutine_threadsafe(asyncio.wait_for(main(), 30), loop()).result()
    assert found == (["add", "total", "misbehave"], ["5"])
