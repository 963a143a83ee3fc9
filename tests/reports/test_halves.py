"""The same tasks in the first and in the second half of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import SyntheticRun

from sandmill.environments.task import Boundary, Graded, InfrastructureFailure
from sandmill.reports.halves import Halves
from sandmill.reports.metrics import read_episodes
from sandmill.rollouts.events import EpisodeRecord, EvaluationPhase
from sandmill.rollouts.trajectory import Episode, Trajectory


def record(step: int, task: str, passed: bool | None, phase: EvaluationPhase | None = None) -> EpisodeRecord:
    verdict = (
        InfrastructureFailure(boundary=Boundary.EXEC, reason="x", retryable=True) if passed is None else Graded(reward=0.0, passed=passed)
    )
    trajectory = Trajectory(turns=(), commands=(), spans=(), text=(("task", f"do {task}"),))
    return EpisodeRecord(
        step=step, split="train", phase=phase, episode=Episode(group="g", index=0, task_id=task, trajectory=trajectory, verdict=verdict)
    )


def counted(steps: int, *records: EpisodeRecord) -> Halves:
    halves = Halves(steps)
    assert list(halves.watching(records)) == list(records)
    return halves


def test_the_guides_example_comes_out() -> None:
    """40 % in the first half, 82 % in the second, 40 episodes each half."""
    early = [record(1, "a", number < 16) for number in range(40)]
    late = [record(4, "a", number < 33) for number in range(40)]
    [task] = counted(4, *early, *late).tasks
    assert (task.first.passed, task.first.graded, task.second.passed, task.second.graded) == (16, 40, 33, 40)
    assert task.change == pytest.approx(0.425)


def test_failures_and_evaluations_are_in_no_rate_and_one_half_alone_has_no_change() -> None:
    halves = counted(
        2,
        record(1, "a", False),
        record(2, "a", None),
        record(2, "a", True),
        record(1, "b", True),
        record(0, "c", True, EvaluationPhase.BEFORE),
    )
    a, b = halves.tasks
    assert (a.change, a.second.failures, a.title) == (1.0, 1, "do a")
    assert (b.change, b.second.graded) == (None, 0)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc"), st.sampled_from([True, False, None]))))
def test_every_finished_episode_is_in_exactly_one_half(steps: int, made: list[tuple[int, str, bool | None]]) -> None:
    halves = counted(steps, *(record(*one) for one in made))
    total = sum(half.graded + half.failures for task in halves.tasks for half in (task.first, task.second))
    assert total == sum(step <= steps for step, _, _ in made)


def test_a_run_that_learns_gains(tmp_path: Path) -> None:
    folder = SyntheticRun(tmp_path / "run").write()
    halves = Halves(40)
    for _ in halves.watching(read_episodes(folder)):
        pass
    assert halves.change is not None
    assert halves.change.low > 0
    assert halves.change.tasks == 24
