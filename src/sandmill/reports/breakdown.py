"""Steps and episodes in; where their seconds went out.

A step's wall-clock time has parts that the loop measures (rollout, training, publish, saving). The rollout part is many episodes
at once, so it is shared out in proportion to what those episodes were doing: waiting for the model, running commands, grading,
starting sandboxes. Queue and idle are consequences of the others and appear only in the breakdown of episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from sandmill.rollouts.events import StepFinished, StepPart
from sandmill.rollouts.trajectory import Episode, Stage

ACTIVE_STAGES = (Stage.MODEL, Stage.COMMAND, Stage.GRADING, Stage.SANDBOX)

STEP_LABELS: Mapping[str, str] = {
    Stage.MODEL: "model",
    Stage.COMMAND: "commands",
    Stage.GRADING: "grading",
    Stage.SANDBOX: "sandbox start",
    "other": "rollout, other",
    StepPart.TRAINING: "training",
    StepPart.PUBLISH: "publishing weights",
    StepPart.SAVING: "saving",
}
"""Parts of a step's time in the order they are drawn, with the words a person reads."""

EPISODE_LABELS: Mapping[str, str] = {
    Stage.QUEUE: "queue",
    Stage.SANDBOX: "sandbox start",
    Stage.MODEL: "waiting for the model",
    Stage.COMMAND: "commands",
    Stage.GRADING: "grading",
    Stage.IDLE: "waiting for the group",
}


def step_seconds(step: StepFinished) -> dict[str, float]:
    """Seconds by key of STEP_LABELS; they add up to the step's wall-clock time."""
    active = {stage: max(0.0, step.episode_seconds.get(stage, 0.0)) for stage in ACTIVE_STAGES}
    total, rollout = math.fsum(active.values()), step.seconds.get(StepPart.ROLLOUT, 0.0)
    parts: dict[str, float] = {str(stage): rollout * value / total if total else 0.0 for stage, value in active.items()}
    known = {str(StepPart.TRAINING), str(StepPart.PUBLISH), str(StepPart.SAVING)}
    unknown = math.fsum(value for part, value in step.seconds.items() if part not in known and part != StepPart.ROLLOUT)
    parts["other"] = unknown + (0.0 if total else rollout)
    parts |= {part: step.seconds.get(part, 0.0) for part in known}
    return {key: parts[key] for key in STEP_LABELS}


def total_seconds(steps: Iterable[StepFinished]) -> dict[str, float]:
    """Seconds by key of STEP_LABELS, summed over steps."""
    every = [step_seconds(step) for step in steps]
    return {key: math.fsum(step[key] for step in every) for key in STEP_LABELS}


def episode_seconds(episode: Episode) -> dict[str, float]:
    """Seconds by key of EPISODE_LABELS in one episode's timeline."""
    spans = episode.trajectory.spans
    return {key: math.fsum(span.end_s - span.start_s for span in spans if span.stage == key) for key in EPISODE_LABELS}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each part's share of the whole in [0, 1]; empty when nothing was measured."""
    total = math.fsum(seconds.values())
    return {key: value / total for key, value in seconds.items()} if total > 0 else {}
