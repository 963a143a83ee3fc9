"""What a model is warm-started on: a demonstration is a dialogue's text, cut into segments with a loss weight each."""

from __future__ import annotations

import math

import msgspec

AGENT_WEIGHT = 1.0
"""Loss weight of what the agent wrote."""
CONTEXT_WEIGHT = 0.1
"""Loss weight of prompts and observations, so that every word's embedding is trained."""


class Segment(msgspec.Struct, frozen=True):
    """A stretch of text and the weight (>= 0) of its tokens in the supervised loss."""

    text: str
    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"a segment's weight must be finite and not negative, not {self.weight}")


class Demonstration(msgspec.Struct, frozen=True):
    """One scripted dialogue, in order."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The whole dialogue."""
        return "".join(segment.text for segment in self.segments)
