"""What happened in an episode: the tokens (the truth), the timeline, the verdict and the cost, in frozen records."""

from __future__ import annotations

import enum

import msgspec

from sandmill.environments.access.meter import JudgeCall
from sandmill.environments.task import Command, Limit, Verdict, reward_of
from sandmill.models.model import StopReason

SCHEMA_VERSION = 1


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One round: the tokens given since the last reply (mask 0), then the tokens sampled (mask 1) with what they were sampled under."""

    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop: StopReason

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.policy_versions):
            raise ValueError("a turn's token ids, log-probabilities and policy versions must have equal length")


class Stage(enum.StrEnum):
    """What an episode's time goes to."""

    QUEUE = "queue"
    """Waiting for admission (a cache row or a sandbox slot)."""
    SANDBOX = "sandbox"
    """Creating and preparing the sandbox."""
    MODEL = "model"
    """Waiting for the model, sampling included."""
    COMMAND = "command"
    """A command running in the sandbox."""
    GRADING = "grading"
    """Killing what is left, collecting and grading."""
    IDLE = "idle"
    """Finished and waiting for the slowest of its group."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of an episode's life: seconds since the run's clock started."""

    stage: Stage
    start_s: float
    end_s: float


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Turns in order, the commands they ran, the timeline, and the limit hit (if any)."""

    turns: tuple[Turn, ...]
    commands: tuple[Command, ...]
    spans: tuple[Span, ...]
    limit: Limit | None = None
    malformed_calls: int = 0
    answer: str | None = None
    text: tuple[tuple[str, str], ...] = ()
    """For people only: (role, text) pairs, role one of task, model, tool, note. Hostile content, never re-encoded."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for turn in self.turns for token in (*turn.context_ids, *turn.token_ids))

    @property
    def sampled_count(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task, identified by group id and index, never by prompt text."""

    group: str
    index: int
    task_id: str
    trajectory: Trajectory
    verdict: Verdict
    cost_microusd: int = 0
    attempt: int = 0
    gradings: int = 0
    """How often what the agent left was graded: more than once where a grading broke. 0: it never came to that."""
    judge_calls: tuple[JudgeCall, ...] = ()
    """What graders asked of judges, of gradings that broke, too."""
    schema_version: int = SCHEMA_VERSION

    @property
    def reward(self) -> float | None:
        return reward_of(self.verdict)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All episodes of one task in one step, ordered by index."""

    id: str
    task_id: str
    episodes: tuple[Episode, ...]
