"""The model seam: token ids in, token ids and log-probabilities out.

A `Session` is one episode's conversation with the model: its key-value cache lives from the first turn to `close()`.
Text never crosses this seam.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec


class StopReason(enum.StrEnum):
    """Why sampling of one turn ended; it travels with the turn."""

    STOP = "stop"
    """A stop token was sampled (it is the last of `token_ids`)."""
    LENGTH = "length"
    """`max_new_tokens` was reached without a stop token."""
    CONTEXT = "context"
    """The model's context is full."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Log-probabilities are of the distribution sampled from (after temperature and top-p).

    `temperature` 0 is greedy: argmax, with the log-probability under temperature 1.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled reply: equal-length token ids, log-probabilities (nats) and policy versions, and why it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop: StopReason

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.policy_versions):
            raise ValueError("token ids, log-probabilities and policy versions must have equal length")


class Session(Protocol):
    """One episode's cache. Not for concurrent use."""

    async def sample(self, context_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Appends `context_ids` (prompt or observation) to the cache, samples a reply and keeps it in the cache.

        Raises ContextFull when `context_ids` do not fit, EngineDied when the engine ended.
        """
        ...

    async def close(self) -> None:
        """Gives the cache row back. Idempotent; safe while cancelled."""
        ...


class Model(Protocol):
    """A policy that can be sampled from by many sessions at once."""

    @property
    def context_length(self) -> int: ...

    @property
    def version(self) -> int:
        """Number of weight updates published so far."""
        ...

    async def session(self, *, seed: int) -> Session:
        """Waits for a free cache row. All randomness of the session derives from `seed` (64 bits) and its own tokens, so a
        sample does not depend on what else is in flight."""
        ...

    async def close(self) -> None: ...
