"""Packages whose rewards are over whole groups: one grading, in which a member may have no score, or nobody."""

import asyncio

import pytest
from contest import contest

from sandmill.environments.access.meter import Meter, present_meter
from sandmill.environments.grading import grade_episode, grade_group
from sandmill.environments.handover import GradesGroups
from sandmill.environments.task import AgentLimited, Boundary, InfrastructureFailure, Limit, Submission


def graded(environment, *submissions, **more):
    """The group's verdicts; ends the package."""

    async def main():
        try:
            return await grade_group(environment, environment.splits["train"][0], submissions, timeout_s=30.0, **more)
        finally:
            await environment.close()

    return asyncio.run(main())


def answers(*texts):
    return [Submission(answer=text) for text in texts]


@pytest.mark.parametrize("turns", [False, True])
def test_a_reward_depends_on_the_others_of_the_group(turns):
    environment = contest(turns=turns)
    assert isinstance(environment, GradesGroups)
    verdicts = graded(environment, *answers("3", "1", "2"))
    assert [(verdict.reward, verdict.parts["members"]) for verdict in verdicts] == [(2.0, 3.0), (0.0, 3.0), (1.0, 3.0)]


@pytest.mark.parametrize("turns", [False, True])
def test_an_episode_alone_is_a_group_of_one(turns):
    environment = contest(turns=turns)

    async def main():
        try:
            return await grade_episode(environment, environment.splits["train"][0], Submission(answer="3"), None)
        finally:
            await environment.close()

    verdict = asyncio.run(main())
    assert (verdict.reward, verdict.parts) == (0.0, {"members": 1.0})


@pytest.mark.parametrize(("said", "reason"), [("fail", "a reward function raised"), ("nan", "is nan (float), not a finite number")])
def test_a_member_without_a_score_is_the_only_one_without(said, reason):
    first, broken, last = graded(contest(turns=False), *answers("1", said, "2"))
    assert (first.reward, last.reward) == (1.0, 2.0)
    assert isinstance(broken, InfrastructureFailure)
    assert (broken.boundary, broken.retryable) == (Boundary.GRADER, False)
    assert reason in broken.reason


@pytest.mark.parametrize(
    ("more", "said", "reason"),
    [([], "error", "the grader broke"), ([1.0], "2", "3 scores for a group of 2"), (["x"], "2", "3 scores for a group of 2")],
)
def test_what_breaks_the_grading_leaves_all_without_a_reward(more, said, reason):
    verdicts = graded(contest(turns=False, more=more), *answers("1", said))
    assert all(isinstance(verdict, InfrastructureFailure) and verdict.boundary is Boundary.GRADER for verdict in verdicts)
    assert all(reason in verdict.reason for verdict in verdicts)


def test_a_limited_episode_keeps_its_limit():
    limited, _ = graded(contest(turns=False), Submission(answer="2", limit=Limit.TOKENS), *answers("1"))
    assert limited == AgentLimited(limit=Limit.TOKENS, reward=1.0, passed=True, parts={"members": 2.0})


@pytest.mark.parametrize("retries", [0, 1])
def test_what_the_grader_asked_and_was_not_answered_spoils_the_whole_grading(retries):
    environment, meter = contest(turns=False), Meter()
    own, busy = environment.grade_group, InfrastructureFailure(boundary=Boundary.JUDGE, reason="busy", retryable=True)

    async def grade(task, submissions):
        if meter.gradings == 1:
            present_meter().failed(busy)
        return await own(task, submissions)

    environment.grade_group = grade
    verdicts = graded(environment, *answers("3", "1"), retries=retries, meter=meter)
    assert meter.gradings == retries + 1
    assert list(verdicts) == [busy, busy] if not retries else [verdict.reward for verdict in verdicts] == [1.0, 0.0]
