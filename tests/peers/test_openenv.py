"""A project that `openenv init` makes is served in the sandbox and played over its WebSocket.

Installs openenv 0.10.0 with its dependencies (about 330 MB), twice: for the command, and with the project that it makes.
"""

import asyncio
import io
import shutil
import tarfile

import pytest
from dialogues import said
from playing import environment

from sandmill.environments.packages.install import install
from sandmill.environments.packages.package import Package
from sandmill.environments.task import Graded, Limit, NoAnswer
from sandmill.errors import GraderFailed
from sandmill.sandboxes import Sandbox, SandboxSpec

VERSION = "0.10.0"
SHOP = """
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("shop")
        self.sold = 0

        @server.tool
        def sell(pieces: int) -> str:
            \"\"\"Sells pieces.\"\"\"
            if pieces < 0:
                raise ValueError("nothing to sell")
            self.sold += pieces
            return f"{self.sold} sold"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **more):
        self.sold = 0
        return Observation(metadata={}, done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        seen = super().step(action, timeout_s, **more)
        return seen.model_copy(update={"reward": float(self.sold), "done": self.sold >= 5})

    async def step_async(self, action, timeout_s=None, **more):
        seen = await super().step_async(action, timeout_s, **more)
        return seen.model_copy(update={"reward": float(self.sold), "done": self.sold >= 5})

    def _step_impl(self, action, timeout_s=None, **more):
        raise ValueError("tools only")

    @property
    def state(self):
        return State()


app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=4)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The folder that `openenv init word_env` makes."""

    async def main():
        installed = await install(Package(requirements=(f"openenv=={VERSION}",)))
        spec = SandboxSpec.of(image=installed.record.image, memory="1Gi")
        async with await Sandbox.from_spec.aio(spec) as sandbox:
            done = await sandbox.run.aio("sh", "-c", "openenv init word_env && tar -c word_env > made.tar", timeout=300, merge_stderr=True)
            assert done.exit_code == 0, done.stdout[-2000:]
            made = await sandbox.read.aio("made.tar", max_bytes=4 << 20)
        installed.use.release()
        return made

    folder = tmp_path_factory.mktemp("openenv")
    with tarfile.open(fileobj=io.BytesIO(asyncio.run(main()))) as archive:
        archive.extractall(folder, filter="data")
    (folder / "word_env" / "README.md").unlink()  # its colours are drawn anew each time, and what is installed is found by its content
    return folder / "word_env"


def test_a_project_as_it_is_made_is_played(project):
    word = environment(f"openenv/{project}@{VERSION}", instructions="Say something long.")

    async def main():
        try:
            return [await said(word, "hello", "hi"), await said(word, limit=Limit.TURNS)]
        finally:
            await word.close()

    (reactions, verdict), (_, silent) = asyncio.run(main())
    assert word.splits["train"][0].prompt.startswith("Say something long.\n\n")
    assert word.offer.tools == ()
    assert '"echoed_message": "hello", "message_length": 5' in reactions[0].text
    assert "original_message" not in reactions[0].text
    assert isinstance(verdict, Graded)
    assert verdict.reward == pytest.approx(0.7)
    assert isinstance(silent, NoAnswer)


def test_more_episodes_run_at_once_than_the_server_takes_sessions(project):
    word = environment(f"openenv/{project}@{VERSION}")

    async def main():
        try:
            return await asyncio.gather(*(said(word, "x" * number) for number in range(1, 9)))
        finally:
            await word.close()

    assert [verdict.reward for _, verdict in asyncio.run(main())] == [pytest.approx(number / 10) for number in range(1, 9)]


def test_by_the_tool_step_a_wrong_action_goes_back_to_the_model(project):
    word = environment(f"openenv/{project}@{VERSION}", act="tool")

    async def main():
        try:
            return await said(word, ("step", {"word": "hello"}), ("step", {"message": "hello"}))
        finally:
            await word.close()

    (refused, taken), verdict = asyncio.run(main())
    assert (refused.ok, "message: Field required" in refused.text, taken.ok) == (False, True, True)
    assert verdict.reward == 0.5


RAISING = """
        if action.message == "illegal":
            raise ValueError("that move is not legal")
        if action.message == "leave":
            import os
            os._exit(3)
"""


def test_a_step_that_raises_is_refused_and_a_server_that_ends_is_no_reward(project, tmp_path):
    """The folder as it is made, with an environment that refuses an action as environments do: by raising."""
    place = tmp_path / "word_env"
    shutil.copytree(project, place)
    program = place / "server" / "word_env_environment.py"
    head, step, tail = program.read_text().partition("        self._state.step_count += 1")
    program.write_text(head + RAISING.lstrip("\n") + step + tail)
    word = environment(f"openenv/{place}@{VERSION}")

    async def main():
        try:
            played = await said(word, "illegal", "hello")
            with pytest.raises(GraderFailed):
                await said(word, "hello", "leave")
            return played
        finally:
            await word.close()

    (refused, taken), verdict = asyncio.run(main())
    assert (refused.ok, refused.over, refused.text, taken.ok) == (False, False, "that move is not legal", True)
    assert (verdict.reward, verdict.parts) == (0.5, {"steps": 1.0, "refused": 1.0})


def test_tools_of_an_environment_with_mcp_are_offered_by_their_names(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").touch()
    (tmp_path / "server" / "app.py").write_text(SHOP)
    (tmp_path / "openenv.yaml").write_text("name: shop\napp: server.app:app\n")
    shop = environment(f"openenv/{tmp_path}@{VERSION}")

    async def main():
        try:
            return await said(shop, ("sell", {"pieces": 2}), ("sell", {"pieces": -1}), ("sell", {"pieces": 3}))
        finally:
            await shop.close()

    reactions, verdict = asyncio.run(main())
    assert [(tool.name, tool.description) for tool in shop.offer.tools] == [("sell", "Sells pieces.")]
    assert [(one.ok, one.over) for one in reactions] == [(True, False), (False, False), (True, True)]
    assert "2 sold" in reactions[0].text
    assert "nothing to sell" in reactions[1].text
    assert verdict.reward == 9.0
