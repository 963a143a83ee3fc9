"""Packages whose rewards depend on a whole group of episodes. In: the group's submissions. Out: a verdict for each, by one grading.

An episode that takes part in a dialogue ends in a process of its own, which hands its state over; the process that grades the group is
another one, so that no episode's process decides about another's reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from sandmill.environments.environment import Artifacts
from sandmill.environments.foreign import GRADING_S, DialogueEnvironment, ForeignEnvironment
from sandmill.environments.foreign_interaction import Ending, ForeignInteraction
from sandmill.environments.packages.loaded import Lost
from sandmill.environments.packages.protocol import HandedOver, Member
from sandmill.environments.task import Boundary, InfrastructureFailure, Submission, Task, Verdict
from sandmill.environments.verdicts import reason_of
from sandmill.errors import GraderFailed

Part = Mapping[str, Any] | msgspec.Raw
_ENDING: Final = Ending("hand_over", HandedOver)


class RepliesTogether(ForeignEnvironment):
    """Replies to one prompt, graded together. See `GradesGroups`."""

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """As a group of one."""
        return (await self.grade_group(task, (submission,)))[0]

    async def grade_group(self, task: Task, submissions: Sequence[Submission]) -> Sequence[Verdict]:
        """See `GradesGroups`."""
        return await _graded(self, task, submissions, [{"answer": one.answer} for one in submissions])


class DialoguesTogether(DialogueEnvironment):
    """Episodes of one task, graded together. See `GradesGroups`."""

    async def interact(self, task: Task, seed: int) -> ForeignInteraction:
        """See `Interactive`. Its end is handed over."""
        episode = await super().interact(task, seed)
        episode.ending = _ENDING
        return episode

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """As a group of one."""
        return (await self.grade_group(task, (submission,)))[0]

    async def grade_group(self, task: Task, submissions: Sequence[Submission]) -> Sequence[Verdict]:
        """See `GradesGroups`."""
        records = [one.record or await self.answered(task, one) for one in submissions]
        return await _graded(self, task, submissions, [msgspec.Raw(record) for record in records])


async def _graded(environment: ForeignEnvironment, task: Task, submissions: Sequence[Submission], members: Sequence[Part]) -> list[Verdict]:
    worker = await environment.service.worker()
    try:
        found = await worker.grade_group(environment.row(task), members, timeout_s=GRADING_S)
    except Lost as error:
        lost = InfrastructureFailure(boundary=Boundary.GRADER, reason=reason_of(error), retryable=True)
        return [lost] * len(submissions)
    return [_verdict(environment, one, submission) for one, submission in zip(found.members, submissions, strict=True)]


def _verdict(environment: ForeignEnvironment, member: Member, submission: Submission) -> Verdict:
    if member.score is not None:
        return environment.verdict(member.score, submission)
    reason = reason_of(GraderFailed(member.failed or "the grader gave neither a score nor a reason"))
    return InfrastructureFailure(boundary=Boundary.GRADER, reason=reason, retryable=False)
