"""Events of a run in; the state that a progress display shows out. No printing happens here."""

from __future__ import annotations

import time
from collections import deque

from sandmill.reports.breakdown import step_seconds
from sandmill.rollouts.events import (
    EpisodeFinished,
    EvaluationFinished,
    Event,
    InFlight,
    RunStage,
    StageAdvanced,
    StageChanged,
    StepFinished,
)

RECENT_STEPS = 8
"""Steps over which speed, time left and the breakdown are averaged."""


class RunView:
    """What is known about a run while it goes on."""

    def __init__(self) -> None:
        self.stage: RunStage | None = None
        self.detail = ""
        self.note = ""
        self.total: int | None = None
        self.done = 0
        self.in_flight = 0
        self.failures = 0
        self.episodes_here = 0
        self.tokens_here = 0
        self.steps: deque[StepFinished] = deque(maxlen=RECENT_STEPS)
        self.rewards: deque[float | None] = deque(maxlen=40)
        self.pass_rates: deque[float | None] = deque(maxlen=40)
        self.evaluations: list[EvaluationFinished] = []
        self._stage_since = time.monotonic()

    def apply(self, event: Event) -> None:
        """Takes one event in."""
        if isinstance(event, StageChanged):
            self._begin(event)
        elif isinstance(event, StageAdvanced):
            self.done, self.note = event.done, event.note
        elif isinstance(event, InFlight):
            self.in_flight = event.count
        elif isinstance(event, EpisodeFinished):
            self._count(event)
        elif isinstance(event, StepFinished):
            self._step(event)
        elif isinstance(event, EvaluationFinished):
            self.evaluations.append(event)

    @property
    def step(self) -> StepFinished | None:
        """The last finished training step."""
        return self.steps[-1] if self.steps else None

    @property
    def stage_seconds(self) -> float:
        """Seconds since the current stage began."""
        return time.monotonic() - self._stage_since

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens per second: over the stage while evaluating, else over recent steps."""
        if self.stage is not RunStage.EVALUATING and self.steps:
            seconds = sum(step.wall_s for step in self.steps)
            return sum(step.sampled_tokens for step in self.steps) / seconds if seconds > 0 else None
        return self.tokens_here / self.stage_seconds if self.tokens_here and self.stage_seconds > 0.5 else None

    @property
    def seconds_left(self) -> float | None:
        """What the current stage still needs at its recent speed; None while unknown."""
        if not self.total or not self.done or self.done > self.total:
            return None
        if self.stage is RunStage.TRAINING and self.steps:
            return (self.total - self.done) * sum(step.wall_s for step in self.steps) / len(self.steps)
        return (self.total - self.done) * self.stage_seconds / self.done

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds by part over the recent steps (keys of reports.breakdown.STEP_LABELS); empty before the first step."""
        parts: dict[str, float] = {}
        for step in self.steps:
            for key, seconds in step_seconds(step).items():
                parts[key] = parts.get(key, 0.0) + seconds
        return parts

    def _begin(self, event: StageChanged) -> None:
        same_training = event.stage is RunStage.TRAINING and self.step is not None
        self.stage, self.detail, self.total, self.note = event.stage, event.detail, event.total, ""
        self.done = self.step.step if same_training and self.step is not None else 0
        self.episodes_here = self.tokens_here = 0
        self._stage_since = time.monotonic()

    def _count(self, event: EpisodeFinished) -> None:
        self.episodes_here += 1
        self.tokens_here += event.sampled_tokens
        self.failures += event.failure is not None
        if self.stage is RunStage.EVALUATING:
            self.done = self.episodes_here

    def _step(self, event: StepFinished) -> None:
        self.steps.append(event)
        self.rewards.append(event.reward)
        self.pass_rates.append(event.pass_rate)
        self.done, self.total = event.step, event.steps
