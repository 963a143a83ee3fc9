"""Whole episodes with a package that talks back: what it breaks is the environment's failure, what the agent runs out of is graded."""

import asyncio
import sys
from pathlib import Path

import playground as pg
import pytest

from sandmill.environments.task import AgentLimited, Boundary, Graded, InfrastructureFailure, Limit
from sandmill.rollouts.episode import Place, attempt

sys.path.append(str(Path(__file__).parent.parent / "environments"))
from countdown import countdown


@pytest.fixture(scope="module")
def environment():
    made = countdown()
    yield made
    asyncio.run(made.close())


def one(environment, *lines, **limits):
    task = environment.splits["train"][0]

    async def go():
        async with pg.arena(environment, pg.play(lines), {"g": task}, **limits) as arena:
            return await attempt(arena, task, Place(group="g", index=0), pg.SAMPLING)

    return pg.run(go())


def test_an_episode_is_played_to_its_end_and_graded(environment):
    episode = one(environment, "$ 1", "= 2", "= stop")
    assert isinstance(episode.verdict, Graded)
    assert (episode.verdict.reward, episode.verdict.parts["moves"], len(episode.trajectory.turns)) == (0.0, 2.0, 3)


@pytest.mark.parametrize(("line", "reason"), [("= raise", "the game broke"), ("= 5", "exit code 7"), ("$ lower", "Expected `str`")])
def test_what_the_package_breaks_is_the_environments_failure(environment, line, reason):
    episode = one(environment, "= 1", line)
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert (episode.verdict.boundary, reason in episode.verdict.reason) == (Boundary.ENVIRONMENT, True)


def test_a_package_that_hangs_is_the_environments_failure(environment):
    episode = one(environment, "= hang", environment_timeout_s=1.0)
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert episode.verdict.boundary is Boundary.ENVIRONMENT


def test_turns_that_run_out_are_the_agents_limit_and_graded(environment):
    episode = one(environment, "= 1", max_turns=2)
    assert isinstance(episode.verdict, AgentLimited)
    assert (episode.verdict.limit, episode.verdict.parts["moves"]) == (Limit.TURNS, 2.0)


def test_a_package_that_gives_no_number_at_the_end_gives_no_reward(environment):
    episode = one(environment, "= stop")
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert (episode.verdict.boundary, "not a finite number" in episode.verdict.reason) == (Boundary.GRADER, True)
