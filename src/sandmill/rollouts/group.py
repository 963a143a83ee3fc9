"""Many episodes at once: groups of a step, or an evaluation. In: tasks; out: groups with their episodes ordered by index.

Episodes are admitted as places become free, so nothing waits for the slowest of a batch; a group's finished episodes wait only
for each other (their IDLE span), and hold no place while they do. `Watch` sees every attempt as it ends, failures included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from sandmill.environments.task import InfrastructureFailure, Task
from sandmill.errors import EnvironmentFailed
from sandmill.models.model import Sampling
from sandmill.rollouts.arena import Arena
from sandmill.rollouts.episode import Place, Ungraded, attempt
from sandmill.rollouts.together import Together
from sandmill.rollouts.trajectory import Episode, Group, Span, Stage

Watch = Callable[[Episode], None]
"""Called on the event loop with every finished attempt, in order of finishing."""


class Breaker:
    """Ends a run whose infrastructure is down: trips after `limit` attempts in a row ended in InfrastructureFailure."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._streak = 0

    def record(self, episode: Episode) -> None:
        if not isinstance(episode.verdict, InfrastructureFailure):
            self._streak = 0
            return
        self._streak += 1
        if self._streak >= self._limit:
            raise EnvironmentFailed(
                f"{self._streak} attempts in a row ended in infrastructure failures, the last one at {episode.verdict.boundary}: "
                f"{episode.verdict.reason}; mend that and resume the run"
            )


async def run_groups(
    arena: Arena, tasks: Sequence[tuple[str, Task]], *, generations: int, sampling: Sampling, breaker: Breaker, watch: Watch
) -> tuple[Group, ...]:
    """Runs `generations` episodes of each (group id, task) pair; result order is that of `tasks`.

    When one episode ends the run (EngineDied, the breaker), all others are cancelled and cleaned up before the error flies.
    """
    places = asyncio.Semaphore(arena.max_in_flight)

    async def episode(task: Task, group: str, index: int, together: Together) -> Episode:
        async with places:
            ended = await _with_retries(arena, task, Place(group=group, index=index), sampling, breaker, watch)
        if isinstance(ended, Episode):
            await together.without(ended)
            return ended
        episode = ended.graded(await together.verdict(index, ended))
        watch(episode)
        breaker.record(episode)
        return episode

    pending: list[list[asyncio.Task[Episode]]] = []
    try:
        async with asyncio.TaskGroup() as running:
            for group, task in tasks:
                together = Together(arena, task, group, generations)
                pending.append([running.create_task(episode(task, group, index, together)) for index in range(generations)])
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return tuple(
        _group(group, task, [done.result() for done in episodes], arena.origin)
        for (group, task), episodes in zip(tasks, pending, strict=True)
    )


async def _with_retries(arena: Arena, task: Task, place: Place, sampling: Sampling, breaker: Breaker, watch: Watch) -> Episode | Ungraded:
    for number in range(arena.limits.retries + 1):
        episode = await attempt(arena, task, msgspec.structs.replace(place, attempt=number), sampling)
        if isinstance(episode, Ungraded):
            return episode
        watch(episode)
        breaker.record(episode)
        if not (isinstance(episode.verdict, InfrastructureFailure) and episode.verdict.retryable):
            break
    return episode


def _group(group: str, task: Task, episodes: list[Episode], origin: float) -> Group:
    end_s = max((episode.trajectory.spans[-1].end_s for episode in episodes), default=time.perf_counter() - origin)
    return Group(id=group, task_id=task.id, episodes=tuple(_idle_until(episode, end_s) for episode in episodes))


def _idle_until(episode: Episode, end_s: float) -> Episode:
    spans = episode.trajectory.spans
    idle = Span(stage=Stage.IDLE, start_s=spans[-1].end_s, end_s=end_s)
    return msgspec.structs.replace(episode, trajectory=msgspec.structs.replace(episode.trajectory, spans=(*spans, idle)))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that started it: the first leaf of the group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
