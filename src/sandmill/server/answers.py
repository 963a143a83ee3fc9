"""Requests that may be repeated. In: an idempotency key and what was asked. Out: the first answer again, or the right to answer.

The newest ten thousand answers are kept, on disk too: an answer is written together with the object it speaks of.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from types import TracebackType
from typing import Final, Self

from sandmill.server.refusals import Refusal
from sandmill.server.tables import KEPT_ANSWERS, Answer

_LONGEST_KEY: Final = 255
_KEPT_BYTES: Final = 64 << 20
_PATIENCE_S: Final = 30.0


class Answers:
    """What requests with a key were answered."""

    def __init__(self, loaded: list[Answer]) -> None:
        self._known: OrderedDict[tuple[str, str], Answer] = OrderedDict(((answer.owner, answer.key), answer) for answer in loaded)
        self._bytes = sum(len(answer.body) for answer in self._known.values())
        self._open: dict[tuple[str, str], Turn] = {}
        self.number = max((answer.number for answer in loaded), default=0)

    async def turn(self, owner: str, key: str | None, asked: bytes) -> Turn:
        """The right to answer, or (`turn.before`) the answer there was. Waits for a request with the same key that is on its way.

        Raises Refusal (IdempotencyKeyReused) when the key was used for something else.
        """
        if key is None:
            return Turn(self, owner, None, "")
        if not 0 < len(key) <= _LONGEST_KEY or not key.isascii() or not key.isprintable():
            raise Refusal("BadRequest", f"an Idempotency-Key has from 1 to {_LONGEST_KEY} printable ASCII characters")
        digest = hashlib.sha256(asked).hexdigest()
        turn = Turn(self, owner, key, digest)
        while (other := self._open.get((owner, key))) is not None:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await other.over.wait()
            except TimeoutError:
                raise Refusal(
                    "RequestInProgress", "the first request with this Idempotency-Key is still on its way", retry_after_s=1
                ) from None
        before = self._known.get((owner, key))
        if before is not None and before.digest != digest:
            raise Refusal("IdempotencyKeyReused", "this Idempotency-Key was used for another request; use a new one")
        turn.before = before
        return turn

    def keep(self, answer: Answer) -> None:
        """From now on this is the answer."""
        self._known[(answer.owner, answer.key)] = answer
        self._bytes += len(answer.body)
        while len(self._known) > KEPT_ANSWERS or self._bytes > _KEPT_BYTES:
            self._bytes -= len(self._known.popitem(last=False)[1].body)

    def enter(self, turn: Turn, key: str) -> None:
        """A turn begins."""
        self._open[(turn.owner, key)] = turn

    def leave(self, turn: Turn, key: str) -> None:
        """And ends."""
        self._open.pop((turn.owner, key), None)
        turn.over.set()


class Turn:
    """One request's turn. While it is entered, others with its key wait."""

    def __init__(self, answers: Answers, owner: str, key: str | None, digest: str) -> None:
        self._answers = answers
        self.owner = owner
        self.key = key
        self.digest = digest
        self.before: Answer | None = None
        self.over = asyncio.Event()
        self._made: Answer | None = None

    def answer(self, status: int, body: bytes) -> Answer | None:
        """The answer to be stored with what it speaks of; None without a key."""
        if self.key is None:
            return None
        self._answers.number += 1
        self._made = Answer(self.owner, self.key, self._answers.number, self.digest, status, body)
        return self._made

    def __enter__(self) -> Self:
        if self.key is not None and self.before is None:
            self._answers.enter(self, self.key)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.key is None or self.before is not None:
            return
        if self._made is not None:  # also after an error: what was stored was done, and may not be done again
            self._answers.keep(self._made)
        self._answers.leave(self, self.key)
