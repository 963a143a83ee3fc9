"""A taskset of verifiers 0.4: its tasks, its tools with their state, its stop conditions, and its own scoring, a machine included.

Installs verifiers 0.4.0 with its dependencies (about 380 MB), with small projects of this file's own.
"""

import asyncio
import json

import pytest
from dialogues import said
from playing import environment
from projects import write

from sandmill.environments.task import Graded, Limit, Message, Role
from sandmill.errors import EnvironmentFailed, GraderFailed

SOURCE = '''
import itertools

import verifiers.v1 as vf


class PadState(vf.State):
    notes: list[str] = []
    setups: int = 0


class PadToolsConfig(vf.ToolsetConfig):
    limit: int = 5


class Pad(vf.Toolset[PadToolsConfig, PadState]):
    async def setup_task(self, task):
        self.word = task.word

    @vf.tool
    async def write(self, note: str) -> str:
        """Writes a note."""
        if note == "crash":
            raise ValueError("no crash")
        self.state.notes.append(note)
        return f"{len(self.state.notes)} of {self.config.limit}; the word begins with {self.word[0]}"


class PadData(vf.TaskData):
    word: str


class PadTaskConfig(vf.TaskConfig):
    tools: PadToolsConfig = PadToolsConfig()


class PadTask(vf.Task[PadData, PadState, PadTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Pad(config.tools)]

    async def setup(self, trace, runtime):
        trace.state.setups += 1

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return len(trace.state.notes) >= 3

    @vf.metric
    async def notes(self, trace) -> float:
        return len(trace.state.notes)

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(self.data.word in trace.last_reply)

    async def broken(self, trace) -> float:
        return float(trace.nowhere)

    @vf.reward(weight=0.5)
    async def noted(self, task, trace, runtime) -> float:
        done = await runtime.run(["echo", *trace.state.notes], {})
        return float(task.word in done.stdout)

    @vf.metric
    async def spoken(self, trace) -> float:
        return float(sum(bool(message.content) for message in trace.assistant_messages))


class PadConfig(vf.TasksetConfig):
    task: PadTaskConfig = PadTaskConfig()
    num_tasks: int = 8
    container: bool = False
    broken: bool = False
    endless: bool = False


class PadTaskset(vf.Taskset[PadTask, PadConfig]):
    def load(self):
        PadTask.NEEDS_CONTAINER = self.config.container
        if self.config.broken:
            PadTask.right.__code__ = PadTask.broken.__code__
        self.__class__.INFINITE = self.config.endless
        numbers = itertools.count() if self.config.endless else range(self.config.num_tasks)
        return (PadTask(self.row(n), self.config.task) for n in numbers)

    def row(self, n):
        return PadData(prompt=f"Note the word number {n}, then say it.", word=f"w{n}x", system_prompt="Be brief.")


__all__ = ["PadTaskset"]
'''


ARENA = """
import asyncio

import verifiers.v1 as vf
from sm_pad import PadTaskset


class ArenaConfig(vf.EnvConfig):
    kind: str = "duel"
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class Arena(vf.Env[ArenaConfig]):
    async def run(self, task, agents):
        await asyncio.gather(agents.one.run(task), agents.other.run(task))


__all__ = ["PadTaskset", "Arena"]
"""


COACH = """
import asyncio

import verifiers.v1 as vf
from sm_pad import PadTask, PadTaskset


class CoachConfig(vf.EnvConfig):
    kind: str = "talk"
    player: vf.AgentConfig = vf.AgentConfig()


class Coach(vf.Env[CoachConfig]):
    async def run(self, task, agents):
        if self.config.kind == "twice":
            await asyncio.gather(agents.player.run(task), agents.player.run(task))
        elif self.config.kind == "run":
            trace = await agents.player.run(task)
            assert trace.ok and trace.rewards
        elif self.config.kind == "open":
            bare = PadTask(task.data.model_copy(update={"prompt": None}), task.config)
            async with agents.player.interaction(bare) as talk:
                await self.coach(talk, await talk.turn("Are you ready?"))
        else:
            async with agents.player.interaction(task) as talk:
                await self.coach(talk, await talk.turn())

    async def coach(self, talk, segment):
        self.rounds = 0
        while not segment.terminated and "done" not in segment.last_reply:
            self.rounds += 1
            segment = await talk.turn(f"round {self.rounds}: you said {segment.last_reply!r} after {len(segment.messages)}")

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("brief", 1.0 if trace.num_turns <= 2 else 0.0, weight=2.0)
        trace.record_metric("turns", trace.num_turns)


__all__ = ["PadTaskset", "Coach"]
"""


@pytest.fixture
def place(tmp_path):
    return write(tmp_path, "sm-pad", SOURCE, sm_arena=ARENA, sm_coach=COACH)


def play(place, *episodes, limit=None, cut=None, **options):
    """Plays each list of turns (of the first task's word) and ends the package."""
    pad = environment(f"verifiers-v1/{place}", 4, 2, **options)
    number = json.loads(bytes(pad.row(pad.splits["train"][0])))["number"]

    async def main():
        try:
            return pad, [await said(pad, *episode(f"w{number}x"), limit=limit, cut=cut) for episode in episodes]
        finally:
            await pad.close()

    return asyncio.run(main())


def test_tools_keep_their_state_and_the_tasks_own_functions_score_it(place):
    calls = [("pad_write", {"bad": 1}), ("pad_write", {"note": "crash"})]
    pad, [right, wrong] = play(place, lambda word: [("pad_write", {"note": word}), *calls, f"it is {word}"], lambda word: ["no"])
    assert [tool.name for tool in pad.offer.tools] == ["pad_write"]
    assert [(one.ok, one.over) for one in right[0]] == [(True, False), (False, False), (False, False), (True, True)]
    assert right[0][0].text == "1 of 5; the word begins with w"
    assert (right[1].reward, right[1].passed, right[1].parts) == (1.5, True, {"right": 1.0, "noted": 1.0, "notes": 1.0, "spoken": 4.0})
    assert (wrong[1].reward, wrong[1].parts["notes"]) == (0.0, 0.0)


def test_the_prompt_has_its_system_message_and_no_answer(place):
    pad = environment(f"verifiers-v1/{place}", 4, 2)
    task = pad.splits["train"][0]

    async def main():
        episode = await pad.interact(task, 1)
        await episode.close()
        await pad.close()
        return episode.opening

    opening = asyncio.run(main())
    assert opening[0] == Message(role=Role.SYSTEM, text="Be brief.")
    assert opening[1].role is Role.USER
    assert not any(f"w{number}x" in message.text for number in range(8) for message in opening)


def test_a_stop_condition_ends_an_episode_and_one_cut_short_is_scored(place):
    _, [(reactions, _)] = play(place, lambda word: [("pad_write", {"note": "a"})] * 3)
    assert [one.over for one in reactions] == [False, False, True]
    _, [(_, verdict)] = play(place, lambda word: [("pad_write", {"note": word})], limit=Limit.TOKENS)
    assert isinstance(verdict, Graded)
    assert (verdict.reward, verdict.parts["notes"]) == (0.5, 1.0)
    _, [(_, cut)] = play(place, lambda word: [], limit=Limit.TOKENS, cut="it is w")
    assert (cut.reward, cut.parts["spoken"]) == (0.0, 1.0)


def test_episodes_at_once_have_machines_of_their_own(place):
    pad = environment(f"verifiers-v1/{place}", 4, 2)

    async def main():
        try:
            return await asyncio.gather(*(said(pad, ("pad_write", {"note": str(number)}), "no") for number in range(6)))
        finally:
            await pad.close()

    assert [verdict.parts["notes"] for _, verdict in asyncio.run(main())] == [1.0] * 6


def test_a_taskset_without_end_is_read_as_far_as_it_is_asked_for(place):
    pad, [(_, verdict)] = play(place, lambda word: [f"it is {word}"], endless=True)
    assert (pad.description.splits, len(pad.splits["train"]), verdict.reward) == ({"train": None}, 4, 1.0)


def test_a_reward_that_raises_is_no_reward(place):
    with pytest.raises(GraderFailed, match="nowhere"):
        play(place, lambda word: ["no"], broken=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"container": True}, "needs a container of its own"),
        ({"module": "sm_arena"}, r"Arena lets 2 agents play \(one, other\)"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_is_not_played_here_is_refused_when_it_is_loaded(place, options, reason):
    with pytest.raises(EnvironmentFailed, match=reason):
        play(place, **options)


def test_an_env_of_the_packages_own_runs_around_the_conversation(place):
    def brief(word):
        return [("pad_write", {"note": word}), f"it is {word}"]

    _, [(reactions, verdict)] = play(place, brief, module="sm_coach", kind="run")
    assert [one.over for one in reactions] == [False, True]
    assert (verdict.reward, verdict.parts["brief"], verdict.parts["noted"], verdict.parts["turns"]) == (3.5, 1.0, 1.0, 2.0)


@pytest.mark.parametrize("kind", ["talk", "open"])
def test_an_env_that_talks_to_its_agent_turn_by_turn_is_the_models_user(place, kind):
    def three(word):
        return ["no", ("pad_write", {"note": word}), "well", f"{word}, done"]

    _, [(reactions, verdict), (_, cut)] = play(place, three, lambda word: ["no"], module="sm_coach", kind=kind)
    assert [one.over for one in reactions] == [False, False, False, True]
    assert (reactions[0].text, reactions[2].text) == ("round 1: you said 'no' after 1", "round 2: you said 'well' after 3")
    assert (verdict.reward, verdict.parts["turns"], verdict.parts["spoken"]) == (1.5, 4.0, 4.0)
    assert (cut.reward, cut.parts["turns"]) == (2.0, 1.0)


def test_a_stop_condition_ends_a_conversation_turn_by_turn(place):
    _, [(reactions, _)] = play(place, lambda word: [("pad_write", {"note": "a"})] * 3, module="sm_coach")
    assert [one.over for one in reactions] == [False, False, True]


def test_a_second_conversation_is_refused_before_the_first_turn(place):
    with pytest.raises(GraderFailed, match="asks for a second conversation, and an episode here is one"):
        play(place, lambda word: ["no"], module="sm_coach", kind="twice")
