"""Many episodes at once: order, admission, retries, the circuit breaker, and that nothing is left behind."""

from __future__ import annotations

import os

import playground as pg
import pytest

from sandmill.environments.health import NEVER_CALLED_AFTER
from sandmill.environments.task import Graded, InfrastructureFailure
from sandmill.errors import EngineDied, EnvironmentFailed, SandboxCreateFailed
from sandmill.rollouts.group import Breaker, run_groups
from sandmill.rollouts.trajectory import Episode, Group, Stage
from sandmill.sandboxes import list_sandboxes


def groups(env, script, *, tasks: int = 3, generations: int = 4, breaker: int = 64, watch=lambda _: None, break_take=None, **settings):
    async def go() -> tuple[Group, ...]:
        named = [(f"group-{n}", task) for n, task in enumerate(env.splits["train"][:tasks])]
        async with pg.arena(env, script, dict(named), **settings) as arena:
            if break_take is not None:
                arena.sandboxes.take = break_take(arena.sandboxes.take)
            return await run_groups(arena, named, generations=generations, sampling=pg.SAMPLING, breaker=Breaker(breaker), watch=watch)

    return pg.run(go())


def test_groups_come_back_in_the_order_of_their_tasks_with_episodes_by_index() -> None:
    env = pg.environment()
    result = groups(env, pg.solver(env))
    assert [group.id for group in result] == ["group-0", "group-1", "group-2"]
    assert [[episode.index for episode in group.episodes] for group in result] == [[0, 1, 2, 3]] * 3
    assert all(isinstance(episode.verdict, Graded) and episode.verdict.passed for group in result for episode in group.episodes)


def test_more_episodes_than_sandboxes_and_rows_all_finish() -> None:
    """NousResearch/hermes-agent#621: concurrency above the pool's size must not deadlock."""
    env = pg.environment("lines")
    result = groups(env, pg.solver(env), tasks=6, generations=5, max_sandboxes=2, max_in_flight=9)
    assert sum(len(group.episodes) for group in result) == 30


def test_finished_members_wait_for_the_slowest_of_their_group_and_that_is_on_the_timeline() -> None:
    env = pg.environment("lines")
    group = groups(env, pg.solver(env), tasks=1)[0]
    ends = {episode.trajectory.spans[-1].end_s for episode in group.episodes}
    assert len(ends) == 1
    assert all(episode.trajectory.spans[-1].stage is Stage.IDLE for episode in group.episodes)


def test_a_failed_creation_is_retried_once_and_every_attempt_is_seen() -> None:
    env = pg.environment("lines")
    attempts: list[Episode] = []
    failures = iter([True, True, False, False, False, False])

    def flaky(take):
        async def maybe(files):
            if next(failures):
                raise SandboxCreateFailed("no room for another sandbox; try fewer at once")
            return await take(files)

        return maybe

    result = groups(env, pg.solver(env), tasks=1, generations=2, watch=attempts.append, break_take=flaky)
    assert [episode.attempt for episode in result[0].episodes] == [1, 1]
    assert sorted((episode.index, episode.attempt) for episode in attempts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(isinstance(episode.verdict, Graded) for episode in result[0].episodes)


def test_an_outage_trips_the_breaker_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """PrimeIntellect-ai/prime-rl#2835: an outage must not burn the budget on failing rollouts."""
    env = pg.environment("lines")
    attempts: list[Episode] = []

    def down(_take):
        async def refuse(_files):
            raise SandboxCreateFailed("the node does not answer")

        return refuse

    with pytest.raises(EnvironmentFailed, match=r"5 attempts in a row .* the node does not answer"):
        groups(env, pg.solver(env), tasks=6, generations=4, breaker=5, watch=attempts.append, break_take=down, max_in_flight=2)
    assert len(attempts) < 12
    assert all(isinstance(episode.verdict, InfrastructureFailure) for episode in attempts)
    assert not [record for record in list_sandboxes() if record.owner_pid == os.getpid()]


def test_a_dead_engine_ends_all_episodes_with_one_error() -> None:
    """PrimeIntellect-ai/prime-rl#3139: a dead server must not leave requests pending for ever."""
    env = pg.environment("lines")

    async def go() -> None:
        named = [(f"g{n}", task) for n, task in enumerate(env.splits["train"][:4])]
        async with pg.arena(env, pg.play(["$ sleep 5"]), dict(named)) as arena:
            arena.model.die("killed by the test")
            await run_groups(arena, named, generations=4, sampling=pg.SAMPLING, breaker=Breaker(64), watch=lambda _: None)

    with pytest.raises(EngineDied, match="killed by the test"):
        pg.run(go())


def test_a_grader_that_is_never_reached_ends_the_step_in_its_middle() -> None:
    env, seen = pg.environment("lines"), []

    async def collect(_task: object, _sandbox: object) -> None:
        raise SandboxCreateFailed(5, "the disk of the host")

    env.collect = collect  # type: ignore[method-assign,assignment]
    with pytest.raises(EnvironmentFailed, match="the grader was never called") as raised:
        groups(env, pg.solver(env), tasks=8, generations=16, breaker=1000, retries=0, watch=seen.append, max_in_flight=8)
    ended = int(str(raised.value).split()[0])
    assert NEVER_CALLED_AFTER <= ended < NEVER_CALLED_AFTER + 8
    assert ended - 8 < len(seen) <= ended  # of those that ended together, the first to be looked at ends the run
    assert not [record for record in list_sandboxes() if record.owner_pid == os.getpid()]


def test_results_do_not_depend_on_what_else_is_in_flight() -> None:
    env = pg.environment()
    alone = groups(env, pg.solver(env), tasks=2, generations=2, max_in_flight=1, max_sandboxes=1)
    together = groups(env, pg.solver(env), tasks=2, generations=2)

    def outcome(found: tuple[Group, ...]) -> list[object]:
        return [(e.group, e.index, e.trajectory.turns, e.verdict) for group in found for e in group.episodes]

    assert outcome(alone) == outcome(together)
