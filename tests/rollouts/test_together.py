"""Groups that are graded together: all members first, those that their infrastructure lost left out, and never a number for these."""

import asyncio
import dataclasses
import sys
from pathlib import Path

import playground as pg
import pytest

from sandmill.environments.task import AgentLimited, Boundary, Graded, InfrastructureFailure, Limit
from sandmill.models.engines.scripted import ScriptedModel
from sandmill.rollouts.group import Breaker, run_groups
from sandmill.rollouts.seeds import derive
from sandmill.rollouts.trajectory import Stage

sys.path.append(str(Path(__file__).parent.parent / "environments"))
from contest import contest


@pytest.fixture(scope="module")
def environment():
    made = contest(turns=True)
    yield made
    asyncio.run(made.close())


def play(environment, *members, watch=lambda _: None, max_in_flight=64, **limits):
    """The episodes of one group. Each member is what its policy says in its first attempt, or a list of that for each of its attempts."""
    task = environment.splits["train"][0]
    scripts = {}
    for index, member in enumerate(members):
        attempts = member if isinstance(member, list) else [member, member]
        for number, said in enumerate(attempts):
            scripts[derive(pg.SEED, "episode", "g", index, number)] = said.split()

    def replies(seed, turn, context):
        return pg.ids(f"= {scripts[seed][turn % len(scripts[seed])]}")

    async def go():
        async with pg.arena(environment, pg.play([""]), {"g": task}, max_in_flight=max_in_flight, **limits) as arena:
            arena = dataclasses.replace(arena, model=ScriptedModel(replies))
            found = await run_groups(arena, [("g", task)], generations=len(members), sampling=pg.SAMPLING, breaker=Breaker(64), watch=watch)
            return found[0].episodes, arena.health

    return pg.run(go())


def rewards(episodes):
    return [episode.reward for episode in episodes]


def test_every_member_is_graded_with_the_others_in_their_order(environment):
    seen = []
    episodes, health = play(environment, "1 stop", "3 stop", "1 1 stop", watch=seen.append)
    assert rewards(episodes) == [0.0, 2.0, 1.0]
    assert {episode.verdict.parts["members"] for episode in episodes} == {3.0}
    assert sorted(episode.index for episode in seen) == [0, 1, 2]
    assert (health.episodes, health.graded) == (3, 3)


def test_a_member_that_was_lost_is_left_out_and_named(environment, caplog):
    episodes, _ = play(environment, "1 stop", "raise", "2 stop")
    lost = episodes[1].verdict
    assert isinstance(lost, InfrastructureFailure)
    assert (lost.boundary, "the contest broke" in lost.reason, episodes[1].attempt) == (Boundary.ENVIRONMENT, True, 1)
    assert rewards(episodes) == [0.0, None, 1.0]
    assert {episodes[index].verdict.parts["members"] for index in (0, 2)} == {2.0}
    assert "graded without members '1 (environment: " in caplog.text


def test_a_member_that_is_played_again_is_waited_for(environment):
    episodes, _ = play(environment, "1 stop", ["exit", "3 stop"], "2 stop")
    assert [episode.attempt for episode in episodes] == [0, 1, 0]
    assert rewards(episodes) == [0.0, 2.0, 1.0]


def test_a_grader_that_breaks_is_no_reward_for_anyone(environment):
    episodes, health = play(environment, "1 stop", "error stop")
    assert all(isinstance(episode.verdict, InfrastructureFailure) for episode in episodes)
    assert all("the grader broke" in episode.verdict.reason for episode in episodes)
    assert [episode.attempt for episode in episodes] == [0, 0]
    assert (health.failures, health.graded) == (2, 0)


def test_a_grading_that_broke_in_passing_is_tried_again_on_the_same_episodes(environment, monkeypatch):
    own, calls = environment.grade_group, []

    async def late(task, submissions):
        calls.append(submissions)
        if len(calls) == 1:
            raise TimeoutError("the package took longer than 30 s")
        return await own(task, submissions)

    monkeypatch.setattr(environment, "grade_group", late)
    episodes, _ = play(environment, "1 stop", "2 stop")
    assert (rewards(episodes), calls[0]) == ([0.0, 1.0], calls[1])
    assert [len(episode.trajectory.turns) for episode in episodes] == [2, 2]


def test_members_that_wait_hold_no_place(environment):
    episodes, _ = play(environment, "1 stop", "2 stop", "3 stop", "4 stop", max_in_flight=1)
    assert rewards(episodes) == [0.0, 1.0, 2.0, 3.0]
    assert [span.stage for span in episodes[0].trajectory.spans][-3:] == [Stage.IDLE, Stage.GRADING, Stage.IDLE]


def test_a_member_at_its_limit_is_graded_with_the_others(environment):
    limited, other = play(environment, "5", "1 stop", max_turns=2)[0]
    assert isinstance(limited.verdict, AgentLimited)
    assert (limited.verdict.limit, limited.reward) == (Limit.TURNS, 1.0)
    assert isinstance(other.verdict, Graded)
