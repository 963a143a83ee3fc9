"""Training episodes in; for each task its passes in the first half of training against the second out: was the gain real?

A task counts where it was graded in both halves. What the infrastructure broke is in neither, and has its own column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sandmill.environments.task import InfrastructureFailure
from sandmill.reports.intervals import Interval, difference_of
from sandmill.rollouts.events import EpisodeRecord, TaskOutcome


class TaskHalves(NamedTuple):
    """One task's attempts in each half of training."""

    title: str
    first: TaskOutcome
    second: TaskOutcome

    @property
    def change(self) -> float | None:
        """The second half's pass rate less the first's; None where a half has no graded attempt."""
        if not (self.first.graded and self.second.graded):
            return None
        return self.second.passed / self.second.graded - self.first.passed / self.first.graded


class Halves:
    """Counts while episodes go by. `steps`: how many training steps there are to halve."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._counts: Counter[tuple[str, bool, str]] = Counter()
        self._titles: dict[str, str] = {}

    def watching(self, records: Iterable[EpisodeRecord]) -> Iterator[EpisodeRecord]:
        """The same records, counted."""
        for record in records:
            if record.phase is None and record.step <= self._steps:
                self._count(record)
            yield record

    def _count(self, record: EpisodeRecord) -> None:
        episode = record.episode
        late = 2 * record.step > self._steps
        self._titles.setdefault(episode.task_id, next((text for role, text in episode.trajectory.text if role == "task"), episode.task_id))
        if isinstance(episode.verdict, InfrastructureFailure):
            self._counts[episode.task_id, late, "failures"] += 1
        else:
            self._counts[episode.task_id, late, "graded"] += 1
            self._counts[episode.task_id, late, "passed"] += episode.verdict.passed

    @property
    def tasks(self) -> tuple[TaskHalves, ...]:
        """Every task that was attempted in training, the largest gain first, then the largest loss, then those of one half only."""
        made = [TaskHalves(title, self._outcome(id, late=False), self._outcome(id, late=True)) for id, title in self._titles.items()]
        return tuple(sorted(made, key=lambda task: (task.change is None, -abs(task.change or 0.0), -(task.change or 0.0), task.title)))

    @property
    def change(self) -> Interval | None:
        """Over tasks graded in both halves: the mean of their changes with its 95 % interval."""
        return difference_of([task.first for task in self.tasks], [task.second for task in self.tasks])

    def _outcome(self, id: str, *, late: bool) -> TaskOutcome:
        counts = (self._counts[id, late, what] for what in ("passed", "graded", "failures"))
        passed, graded, failures = counts
        return TaskOutcome(task_id=id, passed=passed, graded=graded, failures=failures)
