"""Grading: three outcomes, and whatever a grader does, no failure becomes a number."""

import asyncio
import math

import msgspec
import pytest

from sandmill.environments.access.meter import Meter, present_meter
from sandmill.environments.grading import grade_episode
from sandmill.environments.health import ALL_ZERO_AFTER, NEVER_CALLED_AFTER, GraderHealth
from sandmill.environments.task import (
    AgentLimited,
    Boundary,
    Graded,
    InfrastructureFailure,
    Limit,
    NoAnswer,
    Submission,
    Task,
    reward_of,
)
from sandmill.environments.verdicts import reason_of
from sandmill.errors import IsolationUnavailable, SandboxCreateFailed

TASK = Task(id="t", prompt="?", identity="i")


class Own:
    """An environment whose grader is the given coroutine function."""

    name, version, digest = "own", "1", "d"

    def __init__(self, grader):
        self.grader = grader
        self.splits = {"train": (TASK,), "heldout": ()}

    def files(self, task):
        return {"start.txt": b"as given"}

    async def grade(self, task, submission, artifacts):
        return await self.grader(submission, artifacts)


def grade(grader, *, limit=None, answer="4", timeout_s=5.0, health=None):
    return asyncio.run(grade_episode(Own(grader), TASK, Submission(answer=answer, limit=limit), None, timeout_s=timeout_s, health=health))


def returns(value):
    async def grader(submission, artifacts):
        return value

    return grader


def raises(error):
    async def grader(submission, artifacts):
        raise error

    return grader


def forged(reward=1.0, passed=True, parts=None):
    """A verdict that was changed after it was made."""
    verdict = Graded(reward=1.0, passed=True, parts=parts or {})
    msgspec.structs.force_setattr(verdict, "reward", reward)
    msgspec.structs.force_setattr(verdict, "passed", passed)
    return verdict


def test_a_verdict_passes_through():
    assert grade(returns(Graded(reward=0.5, passed=False, parts={"a": 0.5}))) == Graded(reward=0.5, passed=False, parts={"a": 0.5})
    assert grade(returns(NoAnswer(reward=-1.0))) == NoAnswer(reward=-1.0)


@pytest.mark.parametrize("limit", list(Limit))
@pytest.mark.parametrize("verdict", [Graded(reward=1.0, passed=True, parts={"a": 1.0}), NoAnswer(reward=0.0)])
def test_an_agent_that_hit_a_limit_is_graded_all_the_same(limit, verdict):
    assert grade(returns(verdict), limit=limit) == AgentLimited(
        limit=limit, reward=verdict.reward, passed=verdict.passed, parts=verdict.parts
    )


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        1.0,
        True,
        "1.0",
        {"reward": 1.0},
        forged(reward=math.nan),
        forged(reward=math.inf),
        forged(reward="1"),
        forged(reward=True),
        forged(passed=1),
        forged(parts={"a": math.nan}),
        AgentLimited(limit=Limit.TIME, reward=1.0, passed=True),
    ],
)
def test_nonsense_is_a_failure_of_the_grader_and_no_number(nonsense):
    verdict = grade(returns(nonsense))
    assert isinstance(verdict, InfrastructureFailure)
    assert verdict.boundary is Boundary.GRADER
    assert "the grader" in verdict.reason
    assert reward_of(verdict) is None


def test_a_nan_reward_cannot_even_be_made():
    async def grader(submission, artifacts):
        return Graded(reward=math.nan, passed=False)

    verdict = grade(grader)
    assert verdict == InfrastructureFailure(
        boundary=Boundary.GRADER, reason="ValueError: a reward must be finite, not nan", retryable=False
    )


@pytest.mark.parametrize(
    ("error", "boundary", "retryable"),
    [
        (KeyError("answer"), Boundary.GRADER, False),
        (ZeroDivisionError(), Boundary.GRADER, False),
        (SystemExit(0), Boundary.GRADER, False),
        (asyncio.CancelledError(), Boundary.GRADER, False),
        (TimeoutError("inner"), Boundary.GRADER, True),
        (SandboxCreateFailed("no sandbox"), Boundary.GRADER, True),
        (OSError(28, "No space left on device"), Boundary.DISK, False),
    ],
)
def test_a_grader_that_raises_is_a_failure_with_its_reason(error, boundary, retryable):
    verdict = grade(raises(error))
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.retryable) == (boundary, retryable)
    assert verdict.reason


def test_a_hanging_grader_ends_at_its_deadline():
    async def grader(submission, artifacts):
        await asyncio.sleep(3600)

    verdict = grade(grader, timeout_s=0.05)
    assert verdict == InfrastructureFailure(
        boundary=Boundary.GRADER, reason="TimeoutError: the grader took longer than 0.05 s", retryable=True
    )


def test_a_grader_that_swallows_its_cancellation_is_left_behind():
    async def grader(submission, artifacts):
        for _ in range(40):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    async def main():
        loop = asyncio.get_running_loop()
        start = loop.time()
        verdict = await grade_episode(Own(grader), TASK, Submission(answer=None), None, timeout_s=0.05)
        return verdict, loop.time() - start

    with asyncio.Runner() as runner:
        verdict, took = runner.run(main())
    assert isinstance(verdict, InfrastructureFailure)
    assert took < 3


def test_no_machine_to_isolate_on_ends_the_run():
    with pytest.raises(IsolationUnavailable):
        grade(raises(IsolationUnavailable("no user namespaces")))


def test_cancellation_is_not_swallowed():
    async def grader(submission, artifacts):
        await asyncio.sleep(3600)

    async def main():
        work = asyncio.ensure_future(grade_episode(Own(grader), TASK, Submission(answer=None), None))
        await asyncio.sleep(0.05)
        work.cancel()
        await work

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_an_episode_without_a_sandbox_is_graded_on_its_starting_files():
    async def grader(submission, artifacts):
        return Graded(reward=float(artifacts == {"start.txt": b"as given"}), passed=True)

    assert grade(grader) == Graded(reward=1.0, passed=True)


def test_reasons_are_bounded_and_inert():
    reason = reason_of(ValueError("\x1b[2J\ud835\x00<b>" + "x" * 10_000))
    assert reason.isprintable()
    assert len(reason) <= 400
    assert reason.startswith("ValueError: \\x1b[2J\\ud835\\x00<b>xxx")


def test_health_counts_calls_and_graded_episodes():
    health = GraderHealth()
    grade(returns(Graded(reward=1.0, passed=True)), health=health)
    grade(returns(Graded(reward=0.0, passed=False)), health=health)
    grade(raises(KeyError("x")), health=health)
    assert (health.episodes, health.calls, health.graded, health.nonzero, health.failures) == (3, 3, 2, 1, 1)


def test_the_breaker_opens_after_failures_in_a_row_only():
    health = GraderHealth(max_failures_in_a_row=3)
    failure = InfrastructureFailure(boundary=Boundary.GRADER, reason="KeyError: 'gold'", retryable=False)
    for _ in range(5):
        health.record(failure, called=True)
        health.record(failure, called=True)
        health.record(Graded(reward=0.0, passed=False), called=True)
    assert health.broken() is None
    for _ in range(3):
        health.record(failure, called=True)
    assert health.broken() == "the grader failed 3 times in a row, the last time with: KeyError: 'gold'"


def test_a_grader_that_fails_in_most_episodes_is_broken_and_one_that_often_fails_is_named():
    often, mostly = GraderHealth(max_failures_in_a_row=10), GraderHealth(max_failures_in_a_row=10)
    failure = InfrastructureFailure(boundary=Boundary.JUDGE, reason="the judge answered 500", retryable=True)
    sound = Graded(reward=1.0, passed=True)
    for verdict in [failure, sound, sound, sound] * 20:
        often.record(verdict, called=True)
    assert often.broken() is None
    assert list(often.alarms()) == ["failures"]
    assert "failed in 20 of 80 episodes so far" in often.alarm()
    for verdict in ([failure, failure, sound] * 27)[:80]:
        assert mostly.broken() is None
        mostly.record(verdict, called=True)
    assert mostly.broken() == "the grader failed in 54 of 80 episodes, the last time with: the judge answered 500"


def gradings(outcomes, *, retries, meter=None):
    """The verdict of a grader that comes to these outcomes, one after the other, and how often it was asked."""
    left = list(outcomes)

    async def grader(submission, artifacts):
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    health = GraderHealth()
    verdict = asyncio.run(
        grade_episode(Own(grader), TASK, Submission(answer="4"), None, timeout_s=5.0, health=health, retries=retries, meter=meter)
    )
    assert (health.episodes, health.calls) == (1, 1)
    return verdict, len(outcomes) - len(left)


def test_a_grading_that_broke_is_tried_again_as_often_as_it_may():
    sound, lost = Graded(reward=1.0, passed=True), SandboxCreateFailed(12, "no memory")
    assert gradings([lost, KeyError("x"), sound, sound], retries=2) == (sound, 3)
    assert gradings([sound, sound], retries=2) == (sound, 1)
    verdict, asked = gradings([lost, lost, sound], retries=1)
    assert asked == 2
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.retryable) == (Boundary.GRADER, False)
    verdict, asked = gradings([lost, sound], retries=0)
    assert (asked, verdict.retryable) == (1, True)


def test_a_verdict_does_not_stand_over_a_request_that_failed():
    """Whatever the grader made of it: the meter is asked last."""
    sound, meter = Graded(reward=1.0, passed=True), Meter()
    failed = InfrastructureFailure(boundary=Boundary.JUDGE, reason="the judge answered 401", retryable=False)

    async def grader(submission, artifacts):
        present_meter().failed(failed)
        return sound

    assert asyncio.run(grade_episode(Own(grader), TASK, Submission(answer="4"), None, meter=meter, retries=3)) == failed
    assert meter.gradings == 1
    assert gradings([sound], retries=1, meter=Meter()) == (sound, 1)


def test_failures_elsewhere_are_not_the_graders():
    health = GraderHealth(max_failures_in_a_row=1)
    health.record(InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason="gone", retryable=True), called=False)
    assert health.broken() is None
    assert health.failures == 0


def test_a_grader_that_is_never_called_is_an_error():
    health = GraderHealth()
    lost = InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason="gone", retryable=True)
    for _ in range(NEVER_CALLED_AFTER):
        assert health.broken() is None
        health.record(lost, called=False)
    assert "the grader was never called" in health.broken()


def test_all_zero_raises_the_alarm_and_one_reward_calms_it():
    health = GraderHealth()
    for _ in range(ALL_ZERO_AFTER):
        assert health.alarm() is None
        health.record(NoAnswer(reward=0.0), called=True)
    assert "all 256 rewards so far are exactly 0" in health.alarm()
    health.record(Graded(reward=0.1, passed=False), called=True)
    assert health.alarm() is None
