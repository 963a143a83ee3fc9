"""The nouns of a task set: what is asked, what comes back, and what the grader may say.

A `Task` carries what the policy may see and never an expected answer; answers stay inside the `Environment`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import msgspec


class Role(enum.StrEnum):
    """Who says a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and its arguments, a JSON object as text; `arguments` is what the model wrote where that is none."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation. `calls` are an assistant's; a tool's message answers them in their order."""

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()

    @classmethod
    def user(cls, text: str) -> Message:
        """What a person asks."""
        return cls(role=Role.USER, text=text)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. `id` is opaque (never a path); `identity` is what train and held-out splits may not share.

    `messages`, where given, is how the conversation begins; `prompt` is then only for people.
    """

    id: str
    prompt: str
    identity: str
    metadata: Mapping[str, str] = {}
    messages: tuple[Message, ...] = ()

    @property
    def opening(self) -> tuple[Message, ...]:
        """How the conversation begins."""
        return self.messages or (Message.user(self.prompt),)


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One finished tool call of an episode, as the grader may inspect it. `exit_code` is None when it timed out."""

    script: str
    exit_code: int | None
    output: str


class Limit(enum.StrEnum):
    """The agent's own limits. An episode that hits one is graded all the same."""

    TURNS = "turns"
    """`maxTurns` rounds were used without a final answer."""
    TOKENS = "tokens"
    """A reply reached `maxCompletionLength` before it stopped."""
    CONTEXT = "context"
    """The episode no longer fits the model's context."""
    TIME = "time"
    """The episode's wall-clock limit passed."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished episode hands to the grader: the final answer, the commands it ran, and the limit it hit, if any."""

    answer: str | None
    commands: tuple[Command, ...] = ()
    limit: Limit | None = None
    messages: tuple[Message, ...] = ()
    """What was said after the opening, a last reply that was cut included. Text of the model and of tools: hostile."""
    record: bytes = b""
    """What the environment's own `Interaction` noted for the grader; the agent has no hand in its form."""


class Boundary(enum.StrEnum):
    """Where the infrastructure broke."""

    SANDBOX_CREATE = "sandbox-create"
    SETUP = "setup"
    EXEC = "exec"
    SANDBOX_LOST = "sandbox-lost"
    MODEL = "model"
    ENVIRONMENT = "environment"
    """The environment's own part of the dialogue: its tools, its replies."""
    GRADER = "grader"
    JUDGE = "judge"
    """A model that the grader asked."""
    MCP = "mcp"
    """A server of tools that the grader asked."""
    DISK = "disk"


class Graded(msgspec.Struct, frozen=True, kw_only=True, tag="graded", tag_field="kind"):
    """The grader looked at a finished episode. `reward` is finite; `parts` are its named components; `passed` is the pass rate's bit."""

    reward: float
    passed: bool
    parts: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        _finite(self.reward)


class NoAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="no-answer", tag_field="kind"):
    """The agent stopped by itself without an answer; the task's own rule says what that is worth."""

    reward: float
    passed: bool = False
    parts: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        _finite(self.reward)


class AgentLimited(msgspec.Struct, frozen=True, kw_only=True, tag="agent-limited", tag_field="kind"):
    """The agent hit one of its own limits and was graded on what it had left behind."""

    limit: Limit
    reward: float
    passed: bool
    parts: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        _finite(self.reward)


class InfrastructureFailure(msgspec.Struct, frozen=True, kw_only=True, tag="infrastructure-failure", tag_field="kind"):
    """Something of ours broke: no reward exists. Not in the pass rate, not in the baseline, never trained on."""

    boundary: Boundary
    reason: str
    retryable: bool


Verdict = Graded | NoAnswer | AgentLimited | InfrastructureFailure


def reward_of(verdict: Verdict) -> float | None:
    """The reward of a graded verdict, or None where no reward exists (never 0.0 for a failure)."""
    return None if isinstance(verdict, InfrastructureFailure) else verdict.reward


def _finite(reward: float) -> None:
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, not {reward}")
