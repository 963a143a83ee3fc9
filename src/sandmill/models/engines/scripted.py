"""A deterministic model without weights: replies in, the same replies out. For everything that needs a `Model` but no learning.

Replies come from a script: `replies(seed, turn, context_ids)` returns the token ids of that turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from sandmill.errors import ContextFull, EngineDied
from sandmill.models.model import Sample, Sampling, StopReason

Replies = Callable[[int, int, tuple[int, ...]], Sequence[int]]
"""(session seed, turn number from 0, context ids) -> token ids of the reply."""


class ScriptedSession:
    """Plays a script; the stop reason follows the sampling settings as a real engine's does."""

    def __init__(self, model: ScriptedModel, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._turn = 0
        self._length = 0
        self._open = True

    async def sample(self, context_ids: Sequence[int], sampling: Sampling) -> Sample:
        """The script's reply, cut at the first stop id, at `max_new_tokens` and at the context's end; log-probabilities are -1."""
        await asyncio.sleep(self._model.delay_s)
        if not self._open:
            raise RuntimeError("this session is closed")
        self._model.check()
        room = self._model.context_length - self._length - len(context_ids)
        if room < 1:
            raise ContextFull(f"{self._length + len(context_ids)} tokens leave no room in a context of {self._model.context_length}")
        reply = tuple(self._model.replies(self._seed, self._turn, tuple(context_ids)))
        if not reply:
            raise ValueError(f"the script of session {self._seed} has no reply for turn {self._turn}")
        token_ids, stop = _cut(reply, sampling, room)
        self._turn += 1
        self._length += len(context_ids) + len(token_ids)
        return Sample(
            token_ids=token_ids, logprobs=(-1.0,) * len(token_ids), policy_versions=(self._model.version,) * len(token_ids), stop=stop
        )

    async def close(self) -> None:
        """Gives the row back. Idempotent."""
        if self._open:
            self._open = False
            self._model.release()


class ScriptedModel:
    """A `Model` that plays `replies`; `die()` makes it fail as a dead engine does."""

    def __init__(self, replies: Replies, *, rows: int = 1024, context_length: int = 1024, delay_s: float = 0.0) -> None:
        self.replies = replies
        self.delay_s = delay_s
        self._context_length = context_length
        self._rows = asyncio.Semaphore(rows)
        self._version = 0
        self._death: str | None = None

    @classmethod
    def cycle(cls, turns: Iterable[Sequence[int]], *, context_length: int = 1024) -> ScriptedModel:
        """Every session plays the same turns in order, and starts over after the last."""
        script = tuple(tuple(turn) for turn in turns)
        return cls(lambda _seed, turn, _context: script[turn % len(script)], context_length=context_length)

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def version(self) -> int:
        return self._version

    async def session(self, *, seed: int) -> ScriptedSession:
        """Waits for a free row."""
        await self._rows.acquire()
        self.check()
        return ScriptedSession(self, seed)

    def publish(self, version: int) -> None:
        """Later tokens carry `version`."""
        self._version = version

    def die(self, reason: str) -> None:
        """From now on every sample fails with EngineDied."""
        self._death = reason

    def check(self) -> None:
        if self._death is not None:
            raise EngineDied(f"the inference engine ended: {self._death}")

    def release(self) -> None:
        self._rows.release()

    async def close(self) -> None:
        """Nothing to stop. Idempotent."""
        self._death = self._death or "it was closed"


def _cut(reply: tuple[int, ...], sampling: Sampling, room: int) -> tuple[tuple[int, ...], StopReason]:
    limit = min(sampling.max_new_tokens, room)
    for index, token in enumerate(reply[:limit]):
        if token in sampling.stop_ids:
            return reply[: index + 1], StopReason.STOP
    return reply[:limit], StopReason.CONTEXT if room < sampling.max_new_tokens and len(reply) >= room else StopReason.LENGTH
