"""Field cases of whole episodes: real sandboxes, graders and packages, with a scripted policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import playground as pg
import pytest

from sandmill.accounts import Activity, RunPrices, read_ledger, spend
from sandmill.config.load import parse_manifest
from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.grading import grade_episode
from sandmill.environments.interaction import Offer
from sandmill.environments.task import AgentLimited, Boundary, Graded, InfrastructureFailure, Limit, Message, Submission, Task
from sandmill.environments.tools import Tool
from sandmill.errors import EnvironmentFailed, SandboxError
from sandmill.models.line_dialogue import LineDialogue
from sandmill.models.model import StopReason
from sandmill.rollouts.arena import SandboxSource
from sandmill.rollouts.episode import Place, attempt
from sandmill.rollouts.group import Breaker, run_groups
from sandmill.rollouts.trajectory import Episode
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.store import RunFolder, Stream
from sandmill.training.recorder import Recorder

SECTION = EnvironmentSection(name="shell@1.0.0", train_tasks=8, held_out_tasks=8, options={"families": ["lines"]})


class Silent:
    """Nobody listens."""

    def on_event(self, event: object) -> None:
        pass

    def should_stop(self) -> bool:
        return False


SMALL = SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20)


def play(script: pg.Script, spec: SandboxSpec = SMALL) -> Episode:
    environment = ShellEnvironment(SECTION)
    task = environment.splits["train"][0]

    async def go() -> Episode:
        source = SandboxSource(spec, capacity=1, ready=0)
        try:
            async with pg.arena(environment, script, {"g": task}) as arena:
                return await attempt(replace(arena, sandboxes=source), task, Place(group="g", index=0), pg.SAMPLING)
        finally:
            await source.close()

    return pg.run(go())


@pytest.mark.case(16)
def test_mini_swe_agent_803_a_model_is_not_asked_on_when_its_sandbox_is_gone() -> None:
    """The sandbox lives for less than the command; the script would go on for three more turns."""
    asked: list[int] = []

    def script(task: Task, turn: int) -> str:
        asked.append(turn)
        return "$ sleep 5"

    episode = play(script, SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20, timeout_s=1.0))
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert (episode.verdict.boundary, episode.reward, asked) == (Boundary.SANDBOX_LOST, None, [0])


@pytest.mark.case(35)
def test_openrlhf_1327_each_turn_keeps_its_own_stop_reason() -> None:
    episode = play(pg.play(["$ true", "= " + "none " * 64]))
    assert [turn.stop for turn in episode.trajectory.turns] == [StopReason.STOP, StopReason.LENGTH]
    assert isinstance(episode.verdict, AgentLimited)
    assert episode.verdict.limit is Limit.TOKENS


class Unsteady(ShellEnvironment):
    """Preparing breaks for the first episode that comes."""

    broken = False

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        if not self.broken:
            self.broken = True
            raise SandboxError("the mirror did not answer")


@pytest.mark.case(70)
def test_cc_plugin_eval_330_an_attempt_that_breaks_and_is_repeated_costs_twice(tmp_path: Path) -> None:
    environment = Unsteady(SECTION)
    named = [("g0", environment.splits["train"][0])]
    manifest = parse_manifest(b"spec: {model: {uri: sandmill/tiny-shell}, environment: {name: shell@1.0.0}}")
    with RunFolder.create(tmp_path / "run", manifest) as folder:
        prices = RunPrices(machine_microusd_per_hour=0, sandbox_microusd_per_hour=3_600_000_000)
        recorder = Recorder(folder, Silent(), prices, start=0, elapsed_s=0.0)

        async def go() -> None:
            async with pg.arena(environment, pg.solver(environment), dict(named)) as arena:
                watch = recorder.watch(Activity.EPISODE, step=1, total=1)
                await run_groups(arena, named, generations=1, sampling=pg.SAMPLING, breaker=Breaker(8), watch=watch)

        pg.run(go())
        rows = list(read_ledger(folder.path / Stream.LEDGER))
    assert [(row.attempt, row.outcome) for row in rows] == [(0, "infrastructure-failure"), (1, "graded")]
    assert all(row.cost_microusd for row in rows)
    assert spend(rows).microusd == recorder.spent_microusd == sum(row.cost_microusd or 0 for row in rows)


class TooMuch(ShellEnvironment):
    """Tasks whose files fit no sandbox, so that every creation fails."""

    def files(self, task: Task) -> Mapping[str, bytes]:
        return {"big": bytes(16 << 20)}


@pytest.mark.case(65)
def test_prime_rl_2835_an_outage_ends_the_run_before_it_burns_the_budget() -> None:
    environment = TooMuch(SECTION)
    named = [(f"g{number}", task) for number, task in enumerate(environment.splits["train"])]
    seen: list[Episode] = []

    async def go() -> None:
        async with pg.arena(environment, pg.solver(environment), dict(named), max_in_flight=2) as arena:
            await run_groups(arena, named, generations=4, sampling=pg.SAMPLING, breaker=Breaker(5), watch=seen.append)

    with pytest.raises(EnvironmentFailed, match="5 attempts in a row"):
        pg.run(go())
    assert len(seen) < 12
    assert {episode.reward for episode in seen} == {None}


def tool(name: str, parameter: str) -> Tool:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return Tool(name=name, description=name, parameters=json.dumps(schema))


@pytest.mark.case(37)
def test_ms_swift_10125_a_tool_has_its_own_parameters_and_no_others() -> None:
    """Schemas are text from end to end: no table of theirs ever gives one tool the other's columns."""
    tools = (tool("search", "query"), tool("open", "path"))
    written = msgspec.json.decode(msgspec.json.encode(tools), type=tuple[Tool, ...])
    assert [json.loads(one.parameters)["properties"].keys() for one in written] == [{"query"}, {"path"}]
    assert "null" not in "".join(one.parameters for one in written)
    dialogue = LineDialogue(pg.TOKENIZER, context_length=512, offer=Offer(tools=written))
    assert dialogue.open([Message.user("hello")])


SLOW = """
import time
SPLITS = ("train", "heldout")

def tasks(split):
    return [{"prompt": f"{split} {n}", "answer": "yes"} for n in range(4)]

def reward(completion, answer):
    if completion == "wait":
        time.sleep(600)
    return completion == answer
"""


@pytest.mark.case(64)
@pytest.mark.usefixtures("clean")
def test_prime_rl_3139_requests_end_with_the_environment_that_they_wait_for(tmp_path: Path) -> None:
    """The sandbox of a package dies under three gradings; each is told, and the next one is graded by another."""
    (tmp_path / "slow.py").write_text(SLOW)
    name = f"python/{tmp_path / 'slow.py'}"
    environment = registry.get(name, EnvironmentSection(name=name, train_tasks=2, held_out_tasks=2))

    async def go() -> tuple[list[object], object]:
        task = environment.splits["train"][0]
        try:
            calls = [grade_episode(environment, task, Submission(answer="wait"), None, timeout_s=300) for _ in range(3)]
            waiting = asyncio.gather(*calls)
            await asyncio.sleep(1.0)
            worker = await environment.service.worker()
            await worker._process.kill.aio()
            lost = await asyncio.wait_for(waiting, 60)
            return lost, await grade_episode(environment, task, Submission(answer="yes"), None)
        finally:
            await environment.close()

    lost, after = asyncio.run(go())
    assert [type(verdict) for verdict in lost] == [InfrastructureFailure] * 3
    assert after == Graded(reward=1.0, passed=True)


@pytest.mark.case(51)
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("column", ["prompt", "reward_model"])
def test_verl_758_a_column_that_the_held_out_file_lacks_is_named_before_anything_runs(tmp_path: Path, column: str) -> None:
    rows = [
        {
            "data_source": "own",
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    (tmp_path / "reward.py").write_text("def compute_score(**given):\n    return 1.0\n")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({k: v for k, v in row.items() if k != column}) + "\n" for row in rows))
    options = {"reward": str(tmp_path / "reward.py"), "heldOut": str(tmp_path / "test.jsonl")}
    section = EnvironmentSection(name=f"verl/{tmp_path / 'train.jsonl'}", train_tasks=2, held_out_tasks=2, options=options)
    with pytest.raises(EnvironmentFailed, match=rf"test\.jsonl, row 0: column '{column}' is missing"):
        registry.get(section.name, section)
