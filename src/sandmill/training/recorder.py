"""What a run keeps and tells: every attempt, step and evaluation goes to the run folder and to the listener through here.

The ledger gets a row the moment an attempt ends, failures included; trajectories and metrics are written when their step is over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sandmill.accounts.ledger import Activity, LedgerRow, Spend, read_ledger, spend
from sandmill.accounts.prices import RunPrices
from sandmill.config.manifest import Parameters
from sandmill.rollouts.events import EpisodeRecord, EvaluationFinished, InFlight, Listener, StageAdvanced, Warned
from sandmill.rollouts.group import Watch
from sandmill.rollouts.trajectory import Episode, Group
from sandmill.store import RunFolder, Stream
from sandmill.training.batch import step_advantages
from sandmill.training.learner import StepStats
from sandmill.training.summaries import episode_finished, judge_rows, ledger_row, step_finished


class Recorder:
    """Owns the streams of one run folder. `elapsed_s` is the run's clock, time of earlier sessions included."""

    def __init__(self, folder: RunFolder, listener: Listener, prices: RunPrices, *, start: int, elapsed_s: float) -> None:
        self.folder = folder
        self.listener = listener
        self._prices = prices
        self._start = start
        self._origin = time.monotonic() - elapsed_s
        ledger = folder.path / Stream.LEDGER
        self._spend: Spend = spend(read_ledger(ledger)) if ledger.exists() else Spend()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._origin

    @property
    def spent_microusd(self) -> int | None:
        """Spent so far by this run, all its sessions together; None when a price is unknown."""
        return self._spend.microusd

    def charge(self, activity: Activity, *, step: int, machine_s: float, outcome: str = "done") -> None:
        """Charges the machine's time of a stretch of work."""
        cost = self._prices.cost(machine_s=machine_s)
        name = self.folder.path.name
        self._enter(
            LedgerRow(run=name, activity=activity, step=step, start=self._start, outcome=outcome, machine_s=machine_s, cost_microusd=cost)
        )

    def watch(self, activity: Activity, *, step: int, total: int) -> Watch:
        """A watch for one step or evaluation of `total` episodes: each attempt is charged and told as it ends."""
        done: set[tuple[str, int]] = set()

        def seen(episode: Episode) -> None:
            name = self.folder.path.name
            self._enter(ledger_row(episode, run=name, activity=activity, step=step, start=self._start, prices=self._prices))
            for row in judge_rows(episode, run=name, step=step, start=self._start):
                self._enter(row)
            done.add((episode.group, episode.index))
            self.listener.on_event(episode_finished(episode))
            self.listener.on_event(InFlight(count=total - len(done)))
            if activity is Activity.EVALUATION:
                self.listener.on_event(StageAdvanced(done=len(done)))

        return seen

    def episodes(self, groups: Sequence[Group], parameters: Parameters, *, step: int) -> None:
        """Keeps one training step's episodes with the advantages they were trained with."""
        for group, result in zip(groups, step_advantages(groups, parameters), strict=True):
            for episode, advantage in zip(group.episodes, result.values, strict=True):
                record = EpisodeRecord(step=step, split="train", episode=episode, advantage=advantage)
                self.folder.append(Stream.TRAJECTORIES, record)

    def step(self, groups: Sequence[Group], stats: StepStats, parameters: Parameters, *, step: int, seconds: Mapping[str, float]) -> None:
        """Keeps one training step's figures and charges the machine's time."""
        self.charge(Activity.TRAINING, step=step, machine_s=sum(seconds.values()))
        row = step_finished(
            groups,
            stats,
            step=step,
            steps=parameters.steps,
            at_s=self.elapsed_s,
            seconds=seconds,
            cost_microusd=self.spent_microusd,
        )
        self.folder.append(Stream.METRICS, row)
        self.listener.on_event(row)

    def evaluation(self, groups: Sequence[Group], row: EvaluationFinished) -> None:
        """Keeps one evaluated split with its episodes."""
        for group in groups:
            for episode in group.episodes:
                record = EpisodeRecord(step=row.step, split=row.split, episode=episode, phase=row.phase, greedy=row.greedy)
                self.folder.append(Stream.TRAJECTORIES, record)
        self.charge(Activity.EVALUATION, step=row.step, machine_s=row.seconds)
        self.folder.append(Stream.EVALUATIONS, row)
        self.listener.on_event(row)

    def warn(self, sentence: str, *, step: int) -> None:
        """Keeps and tells something a person should know."""
        row = Warned(sentence=sentence, at_s=self.elapsed_s, step=step)
        self.folder.append(Stream.METRICS, row)
        self.listener.on_event(row)

    def _enter(self, row: LedgerRow) -> None:
        self.folder.append(Stream.LEDGER, row)
        self._spend = self._spend.plus(row)
