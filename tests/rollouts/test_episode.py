"""An episode: real sandboxes, scripted policy; every way it can end has its own verdict."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import playground as pg
import pytest

from sandmill.environments.task import AgentLimited, Boundary, Graded, InfrastructureFailure, Limit, NoAnswer
from sandmill.errors import EngineDied
from sandmill.models.model import StopReason
from sandmill.rollouts.episode import Place, attempt
from sandmill.rollouts.trajectory import Episode, Stage
from sandmill.sandboxes import Sandbox

PLACE = Place(group="g", index=0)


def one(script: pg.Script, *families: str, task: int = 0, **limits: object) -> Episode:
    env = pg.environment(*families)

    async def go() -> Episode:
        chosen = env.splits["train"][task]
        async with pg.arena(env, script if script is not None else pg.solver(env), {"g": chosen}, **limits) as arena:
            return await attempt(arena, chosen, PLACE, pg.SAMPLING)

    return pg.run(go())


@pytest.mark.parametrize("family", ["lines", "files", "read", "sum", "last", "hop", "find", "write"])
def test_the_reference_solution_passes_in_a_real_sandbox(family: str) -> None:
    episode = one(None, family)  # type: ignore[arg-type]
    assert isinstance(episode.verdict, Graded), episode.verdict
    assert episode.verdict.passed
    assert episode.reward == pytest.approx(1.1)


def test_a_wrong_answer_is_graded_and_not_a_failure() -> None:
    episode = one(pg.play(["$ true", "= none"]), "lines")
    assert episode.verdict == Graded(reward=0.1, passed=False, parts={"solved": 0.0, "worked": 0.1})


def test_a_guess_without_a_working_command_does_not_pass() -> None:
    env = pg.environment("lines")
    episode = one(lambda task, _turn: f"= {env.expected_answer(task)}", "lines")
    assert isinstance(episode.verdict, Graded)
    assert not episode.verdict.passed
    assert episode.trajectory.commands == ()


def test_turns_are_a_limit_and_graded_all_the_same() -> None:
    episode = one(pg.play(["$ true"]), "lines", max_turns=3)
    assert isinstance(episode.verdict, AgentLimited)
    assert episode.verdict.limit is Limit.TURNS
    assert len(episode.trajectory.turns) == 3


def test_a_cut_reply_ends_with_its_own_stop_reason() -> None:
    episode = one(pg.play(["= " + "none " * 64]), "lines")
    assert episode.trajectory.turns[-1].stop is StopReason.LENGTH
    assert isinstance(episode.verdict, AgentLimited)
    assert episode.verdict.limit is Limit.TOKENS


def test_the_episode_clock_is_a_limit_and_graded() -> None:
    episode = one(pg.play(["$ sleep 5"]), "lines", episode_timeout_s=0.5)
    assert isinstance(episode.verdict, AgentLimited)
    assert episode.verdict.limit is Limit.TIME


def test_a_command_past_its_deadline_is_an_observation() -> None:
    episode = one(pg.play(["$ sleep 5", "= none"]), "lines", command_timeout_s=0.3)
    assert isinstance(episode.verdict, Graded)
    assert episode.trajectory.commands[0].exit_code is None
    assert "stopped after 0.3 s" in episode.trajectory.commands[0].output


def test_a_failing_command_is_the_agents_business() -> None:
    episode = one(pg.play(["$ false", "= none"]), "lines")
    assert episode.trajectory.commands[0].exit_code == 1
    assert isinstance(episode.verdict, Graded)


def test_an_agent_whose_command_cannot_be_started_escapes_nothing() -> None:
    episode = one(pg.play([f"$ {pg.LONG}", "= none"]), "lines")
    assert episode.trajectory.commands[0].exit_code == 126
    assert "could not be started" in episode.trajectory.commands[0].output
    assert isinstance(episode.verdict, Graded)
    assert not episode.verdict.passed


def test_odd_bytes_reach_the_policy_decoded_and_the_episode_goes_on() -> None:
    episode = one(pg.play(["$ printf '\\xf0\\x9f'", "= none"]), "lines")
    assert "\ufffd" in episode.trajectory.commands[0].output
    assert isinstance(episode.verdict, Graded)


def test_malformed_replies_go_back_to_the_policy_and_are_counted() -> None:
    episode = one(pg.play(["hello hello", "$", "= none"]), "lines")
    assert episode.trajectory.malformed_calls == 2
    assert len(episode.trajectory.turns) == 3
    assert isinstance(episode.verdict, Graded)


def test_every_token_is_recorded_once_with_its_logprob_and_version() -> None:
    episode = one(None, "hop")  # type: ignore[arg-type]
    turns = episode.trajectory.turns
    assert [len(turn.token_ids) for turn in turns] == [len(turn.logprobs) for turn in turns]
    assert {version for turn in turns for version in turn.policy_versions} == {0}
    assert episode.trajectory.token_ids == tuple(t for turn in turns for t in (*turn.context_ids, *turn.token_ids))
    assert turns[1].context_ids[-1] in pg.DIALOGUE.stop_ids


def test_the_timeline_covers_the_episode_in_order() -> None:
    spans = one(None, "hop").trajectory.spans  # type: ignore[arg-type]
    assert [span.stage for span in spans] == [
        Stage.QUEUE, Stage.MODEL, Stage.SANDBOX, Stage.COMMAND, Stage.MODEL, Stage.COMMAND, Stage.MODEL, Stage.GRADING,
    ]  # fmt: skip
    assert all(span.end_s >= span.start_s for span in spans)
    assert all(b.start_s >= a.end_s for a, b in itertools.pairwise(spans))


def test_a_dead_engine_ends_the_run_and_is_no_verdict() -> None:
    env = pg.environment("lines")

    async def go() -> None:
        async with pg.arena(env, pg.solver(env), {"g": env.splits["train"][0]}) as arena:
            arena.model.die("killed by the test")
            with pytest.raises(EngineDied):
                await attempt(arena, env.splits["train"][0], PLACE, pg.SAMPLING)

    pg.run(go())


def test_a_sandbox_that_dies_is_an_infrastructure_failure_without_a_reward() -> None:
    """SWE-agent/mini-swe-agent#803: a dead sandbox ends the episode instead of running up the step limit."""
    env = pg.environment("lines")
    taken: list[Sandbox] = []

    async def go() -> Episode:
        async with pg.arena(env, pg.play(["$ sleep 5", "= none"]), {"g": env.splits["train"][0]}) as arena:
            hand_out = arena.sandboxes.take

            async def take(files: dict[str, bytes]) -> Sandbox:
                taken.append(await hand_out(files))
                asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(taken[0].terminate.aio()))
                return taken[0]

            arena.sandboxes.take = take
            return await attempt(arena, env.splits["train"][0], PLACE, pg.SAMPLING)

    episode = pg.run(go())
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert episode.verdict.boundary is Boundary.SANDBOX_LOST
    assert episode.verdict.retryable
    assert episode.reward is None
    assert len(episode.trajectory.turns) == 1


def test_a_grader_that_raises_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    env = pg.environment("lines")

    async def broken(*_: object) -> NoAnswer:
        raise KeyError("answers")

    async def go() -> Episode:
        async with pg.arena(env, pg.solver(env), {"g": env.splits["train"][0]}) as arena:
            monkeypatch.setattr(env, "grade", broken)
            return await attempt(arena, env.splits["train"][0], PLACE, pg.SAMPLING)

    verdict = pg.run(go()).verdict
    assert isinstance(verdict, InfrastructureFailure)
    assert verdict.boundary is Boundary.GRADER
    assert "KeyError" in verdict.reason


def test_the_answer_is_nowhere_in_the_agents_sandbox(tmp_path: Path) -> None:
    env = pg.environment("files")
    task = env.splits["train"][0]
    seen = b"".join(env.files(task).values()) + task.prompt.encode() + str(dict(task.metadata)).encode()
    answer = env.expected_answer(task)
    assert answer is not None
    assert f"answer: {answer}".encode() not in seen
    assert b"expected" not in seen
