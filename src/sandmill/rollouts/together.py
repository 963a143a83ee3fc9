"""Groups whose episodes are graded together. In: each member as it ends. Out: its verdict, once all have ended.

A member that its infrastructure lost, retries included, is not waited for, not given to the grader and keeps its own failure: the others
are graded as the smaller group that they are. A grading that breaks for a passing reason is tried again on the same episodes; one that
stays broken leaves the whole group without a reward.
"""

from __future__ import annotations

import asyncio
import logging

from sandmill.environments.grading import grade_group
from sandmill.environments.task import InfrastructureFailure, Task, Verdict
from sandmill.rollouts.arena import Arena
from sandmill.rollouts.episode import Ungraded
from sandmill.rollouts.trajectory import Episode, Stage

_log = logging.getLogger("sandmill.rollouts")


class Together:
    """One group of `size` episodes, of which each comes once, with or `without` anything to grade here."""

    def __init__(self, arena: Arena, task: Task, group: str, size: int) -> None:
        self._arena, self._task, self._group = arena, task, group
        self._missing = size
        self._ended: dict[int, Ungraded] = {}
        self._lost: list[str] = []
        self._all = asyncio.Event()
        self._graded = asyncio.Event()
        self._verdicts: dict[int, Verdict] = {}

    async def verdict(self, index: int, ended: Ungraded) -> Verdict:
        """Waits for the others; the last to come grades them all. Raises IsolationUnavailable."""
        self._ended[index] = ended
        last = self._arrived()
        with ended.timeline.span(Stage.IDLE):
            await self._all.wait()
        with ended.timeline.span(Stage.GRADING):
            if last:
                await self._grade()
            await self._graded.wait()
        return self._verdicts[index]

    async def without(self, episode: Episode) -> None:
        """A member has its verdict already: it was lost, or is of an environment that grades one by one. Raises IsolationUnavailable."""
        if isinstance(episode.verdict, InfrastructureFailure):
            self._lost.append(f"{episode.index} ({episode.verdict.boundary}: {episode.verdict.reason})")
        if self._arrived() and self._ended:
            await self._grade()

    def _arrived(self) -> bool:
        """Whether this was the last."""
        self._missing -= 1
        if self._missing == 0:
            self._all.set()
        return self._missing == 0

    async def _grade(self) -> None:
        if self._lost:
            _log.warning("group %s is graded without members %s", ascii(self._group), ascii("; ".join(self._lost)))
        limits = self._arena.limits
        indices = sorted(self._ended)
        submissions = [self._ended[index].submission for index in indices]
        for _ in range(limits.retries + 1):
            verdicts = await grade_group(
                self._arena.environment, self._task, submissions, timeout_s=limits.grading_timeout_s, health=self._arena.health
            )
            if not any(isinstance(one, InfrastructureFailure) and one.retryable for one in verdicts):
                break
        self._verdicts = dict(zip(indices, verdicts, strict=True))
        self._graded.set()


__all__ = ["Together"]
