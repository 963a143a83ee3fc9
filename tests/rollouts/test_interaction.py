"""Environments that take part in the dialogue: their tools, their replies, their endings, and what happens when they break."""

from __future__ import annotations

import json

import playground as pg
import pytest
from guessing import Guessing

from sandmill.environments.task import AgentLimited, Boundary, Graded, InfrastructureFailure, Limit, Role, ToolCall
from sandmill.rollouts.episode import Place, attempt
from sandmill.rollouts.trajectory import Episode


def one(environment: Guessing, *lines: str, **limits: object) -> Episode:
    task = environment.splits["train"][0]

    async def go() -> Episode:
        async with pg.arena(environment, pg.play(lines), {"g": task}, **limits) as arena:
            return await attempt(arena, task, Place(group="g", index=0), pg.SAMPLING)

    return pg.run(go())


def test_a_tool_of_the_environment_answers_and_ends_the_episode() -> None:
    environment = Guessing()
    episode = one(environment, "$ guess 50", "$ guess 42", "= 7")
    assert episode.verdict == Graded(reward=0.5, passed=True)
    assert len(episode.trajectory.turns) == 2
    assert [message.role for message in environment.graded[0].messages] == [Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert environment.graded[0].messages[0].calls == (ToolCall(name="guess", arguments=json.dumps({"number": "50"})),)
    assert environment.graded[0].messages[1].text == "lower"
    assert environment.games[0].closed == 1


def test_a_tool_that_is_a_program_runs_in_the_agents_sandbox() -> None:
    environment = Guessing()
    episode = one(environment, "$ double 21", "$ guess 42")
    assert isinstance(episode.verdict, Graded)
    [command] = episode.trajectory.commands
    assert (command.script, command.exit_code, command.output) == ('double {"number": "21"}', 0, "42\n")


def test_a_reply_goes_to_the_environment_until_it_takes_it_as_the_answer() -> None:
    environment = Guessing()
    episode = one(environment, "= 7", "= stop")
    assert episode.trajectory.answer == "stop"
    assert [message.text for message in environment.graded[0].messages] == ["7", "noted", "stop"]
    assert environment.graded[0].messages[1].role is Role.USER


def test_a_reply_that_is_cut_is_among_what_was_said() -> None:
    environment = Guessing()
    episode = one(environment, "$ guess 50", "= " + "hello " * 40)
    assert isinstance(episode.verdict, AgentLimited)
    assert environment.graded[0].limit is Limit.TOKENS
    assert environment.graded[0].messages[-1].text.startswith("hello hello")


def test_the_environment_may_begin_the_conversation() -> None:
    for opens, first in ((True, "Q: guess\n"), (False, "Q: hello\n")):
        episode = one(Guessing(opens=opens), "= stop")
        assert pg.DIALOGUE.text(episode.trajectory.turns[0].context_ids) == first


def test_an_unknown_tool_goes_back_to_the_model_and_is_counted() -> None:
    episode = one(Guessing(), "$ ges 5", "$ guess true", "$ guess 42")
    assert episode.trajectory.malformed_calls == 1
    assert isinstance(episode.verdict, Graded)
    assert episode.verdict.passed


@pytest.mark.parametrize(("line", "reason"), [("$ guess raise", "RuntimeError: the game \\x1b[31mbroke")])
def test_what_the_environment_raises_is_its_failure_and_no_reward(line: str, reason: str) -> None:
    environment = Guessing()
    episode = one(environment, line)
    assert episode.verdict == InfrastructureFailure(boundary=Boundary.ENVIRONMENT, reason=reason, retryable=True)
    assert environment.games[0].closed == 1


def test_a_sandbox_that_the_environment_lost_is_not_the_agents() -> None:
    episode = one(Guessing(), "$ guess stop")
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert episode.verdict.boundary is Boundary.ENVIRONMENT


def test_a_tool_that_hangs_is_the_environments_failure() -> None:
    episode = one(Guessing(), "$ guess hang", environment_timeout_s=1.0)
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert episode.verdict.boundary is Boundary.ENVIRONMENT


def test_the_episodes_own_time_is_the_agents_limit_also_while_the_environment_thinks() -> None:
    episode = one(Guessing(), "$ guess hang", episode_timeout_s=1.0)
    assert isinstance(episode.verdict, AgentLimited)
    assert episode.verdict.limit is Limit.TIME


def test_a_side_that_cannot_finish_gives_no_reward() -> None:
    episode = one(Guessing(breaks_at_the_end=True), "= stop")
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert episode.verdict.boundary is Boundary.GRADER
    assert "no score" in episode.verdict.reason
