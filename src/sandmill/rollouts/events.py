"""What a run tells while it goes on: frozen events out of the loop, one `Listener` in.

The same records are what a run folder keeps: `StepFinished` is a row of metrics.jsonl and `EvaluationFinished` a row of
evaluations.jsonl, so whatever was shown live can be recomputed. Numbers that do not exist are None, never 0.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

import msgspec

from sandmill.rollouts.trajectory import SCHEMA_VERSION, Episode


class RunStage(enum.StrEnum):
    """Which part of a run is going on."""

    ENVIRONMENT = "environment"
    """The environment's package is fetched, built, loaded or compiled, as `detail` says. No unit of progress."""
    LOADING = "loading"
    """Model and tokenizer are being made ready. No unit of progress."""
    WARM_START = "warm-start"
    """Supervised steps. Unit: steps."""
    EVALUATING = "evaluating"
    """Held-out evaluation of one split. Unit: episodes."""
    TRAINING = "training"
    """Reinforcement learning. Unit: steps."""
    SAVING = "saving"
    """Checkpoint, adapter or report is being written. No unit of progress."""


class StepPart(enum.StrEnum):
    """What a training step's wall-clock time goes to; the keys of `StepFinished.seconds`."""

    ROLLOUT = "rollout"
    """From the first admission to the last finished episode."""
    TRAINING = "training"
    """Advantages, forward, backward and the optimizer."""
    PUBLISH = "publish"
    """Handing the new weights to the engine."""
    SAVING = "saving"
    """Writing trajectories, metrics and checkpoints."""


class EvaluationPhase(enum.StrEnum):
    """When an evaluation was made."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"
    ALONE = "alone"
    """`sandmill eval`, outside any training."""


class StageChanged(msgspec.Struct, frozen=True, kw_only=True, tag="stage-changed", tag_field="event"):
    """A stage begins. `total` counts its units (see RunStage); None: no unit. `detail` adds words, such as the split's name."""

    stage: RunStage
    total: int | None = None
    detail: str = ""


class StageAdvanced(msgspec.Struct, frozen=True, kw_only=True, tag="stage-advanced", tag_field="event"):
    """`done` units of the current stage are behind us."""

    done: int
    note: str = ""
    """A few words, such as `loss 1.23`."""


class InFlight(msgspec.Struct, frozen=True, kw_only=True, tag="in-flight", tag_field="event"):
    """How many episodes are alive now."""

    count: int


class EpisodeFinished(msgspec.Struct, frozen=True, kw_only=True, tag="episode-finished", tag_field="event"):
    """One episode ended. `reward` and `passed` are None when the infrastructure failed (`failure` says where)."""

    group: str
    index: int
    task_id: str
    reward: float | None
    passed: bool | None
    failure: str | None
    turns: int
    sampled_tokens: int
    seconds: float


class StepFinished(msgspec.Struct, frozen=True, kw_only=True, tag="step-finished", tag_field="event"):
    """One training step is over; a row of metrics.jsonl."""

    step: int
    """1 for the first."""
    steps: int
    """How many the run will have."""
    at_s: float
    """Seconds since the run's clock started, time of earlier sessions included."""
    seconds: Mapping[str, float]
    """Wall-clock seconds by StepPart."""
    episode_seconds: Mapping[str, float]
    """Seconds by episode stage (rollouts.trajectory.Stage), summed over the step's episodes."""
    episodes: int
    graded: int
    passed: int
    failures: int
    """Episodes that ended in InfrastructureFailure: in none of the rates."""
    limited: int = 0
    """Graded episodes that hit one of the agent's own limits."""
    groups_trained: int = 0
    groups_constant: int = 0
    groups_dropped: int = 0
    reward: float | None = None
    """Mean over graded episodes; None when none was graded."""
    sampled_tokens: int = 0
    given_tokens: int = 0
    turns: int = 0
    malformed_calls: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    """Mean per sampled token, nats."""
    kl_sampler: float | None = None
    """Mean of (sampled - recomputed) log-probability, nats: how far sampler and trainer disagree."""
    clip_fraction: float | None = None
    learning_rate: float | None = None
    policy_version: int = 0
    cost_microusd: int | None = None
    """Spent so far; None when a price is unknown."""
    schema_version: int = SCHEMA_VERSION

    @property
    def pass_rate(self) -> float | None:
        """Passed over graded, or None when nothing was graded."""
        return self.passed / self.graded if self.graded else None

    @property
    def wall_s(self) -> float:
        """The step's wall-clock seconds."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens per second of the whole step."""
        return self.sampled_tokens / self.wall_s if self.wall_s > 0 else None


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How often one task was attempted in an evaluation: `graded` + `failures` attempts, of which `passed` passed."""

    task_id: str
    passed: int
    graded: int
    failures: int = 0
    reward_sum: float = 0.0


class EvaluationFinished(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation-finished", tag_field="event"):
    """One split was evaluated under one way of sampling; a row of evaluations.jsonl. Intervals are computed from `tasks`."""

    split: str
    phase: EvaluationPhase
    step: int
    """Training steps behind the evaluated weights."""
    greedy: bool
    samples_per_task: int
    tasks: tuple[TaskOutcome, ...]
    seconds: float
    at_s: float = 0.0
    temperature: float = 1.0
    sampled_tokens: int = 0
    policy_version: int = 0
    schema_version: int = SCHEMA_VERSION

    @property
    def passed(self) -> int:
        return sum(task.passed for task in self.tasks)

    @property
    def graded(self) -> int:
        return sum(task.graded for task in self.tasks)

    @property
    def failures(self) -> int:
        return sum(task.failures for task in self.tasks)

    @property
    def pass_rate(self) -> float | None:
        """Passed over graded attempts, or None when nothing was graded."""
        return self.passed / self.graded if self.graded else None


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as a run folder keeps it; a row of trajectories.jsonl. Training episodes have split `train` and no phase."""

    step: int
    """The training step it was sampled for (1 for the first), or the steps behind the weights in an evaluation."""
    split: str
    episode: Episode
    phase: EvaluationPhase | None = None
    greedy: bool = False
    advantage: float | None = None
    """What its tokens were weighted by; None when it was not trained on."""
    schema_version: int = SCHEMA_VERSION


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-saved", tag_field="event"):
    """The run can be resumed from here."""

    step: int
    path: str


class Warned(msgspec.Struct, frozen=True, kw_only=True, tag="warned", tag_field="event"):
    """Something a person should know that does not stop the run, in one sentence; a row of warnings in metrics.jsonl."""

    sentence: str
    at_s: float = 0.0
    step: int | None = None


Event = StageChanged | StageAdvanced | InFlight | EpisodeFinished | StepFinished | EvaluationFinished | CheckpointSaved | Warned


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. `interrupted`: a person asked to stop; everything up to `steps_done` is saved."""

    run: str
    steps_done: int
    steps: int
    interrupted: bool
    seconds: float
    peak_rss_bytes: int
    cost_microusd: int | None = None


class Listener(Protocol):
    """Who is told. Called from the loop's thread or event loop; returns at once and raises nothing but KeyboardInterrupt.

    It does that only on a `StageAdvanced` of the warm start, which has nothing to save yet.
    """

    def on_event(self, event: Event) -> None: ...

    def should_stop(self) -> bool:
        """True once a person asked to stop: the loop finishes the step, saves and returns."""
        ...


class Silent:
    """A listener that says nothing and never asks to stop."""

    def on_event(self, event: Event) -> None:
        del event

    def should_stop(self) -> bool:
        return False
