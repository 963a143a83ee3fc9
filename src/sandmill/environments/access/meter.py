"""What the graders of one attempt asked outside. In: every request to a judge or a tool server as it ends. Out: records, sums, and
the reason why a verdict cannot be trusted.

A grader may catch what its judge raises and give a number all the same. So the broker notes each request that failed, and no verdict of
that grading stands, whatever else was answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import msgspec

from sandmill.environments.task import InfrastructureFailure


class JudgeCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a judge. Tokens are those that it says; of one that broke off, none are known."""

    judge: str
    outcome: str
    """`answered`, `failed`, or `refused` (by the broker: nothing was sent)."""
    seconds: float
    tokens_in: int = 0
    tokens_out: int = 0
    cost_microusd: int | None
    """None: a price is unknown. Of a request that broke off after it was sent, the most that it can have cost."""


class Spent(msgspec.Struct, kw_only=True):
    """What one grading has used of one judge."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost_microusd: int = 0


class Meter:
    """One attempt's. Used on one event loop."""

    def __init__(self) -> None:
        self.calls: list[JudgeCall] = []
        self.gradings = 0
        """How often what the agent left was graded."""
        self._spent: dict[str, Spent] = {}
        self.lasting: InfrastructureFailure | None = None
        """What was not answered while the episode was played: no further grading makes good for that."""
        self._grading = False
        self._failure: InfrastructureFailure | None = None

    def begin(self) -> None:
        """A grading begins: limits count anew, and what broke an earlier one does not count against it."""
        self._spent.clear()
        self._failure, self._grading = None, True

    def spent(self, judge: str) -> Spent:
        """What this grading has used of a judge so far; changed in place."""
        return self._spent.setdefault(judge, Spent())

    def failed(self, failure: InfrastructureFailure) -> None:
        """A request was not answered."""
        if self._grading:
            self._failure = self._failure or failure
        else:
            self.lasting = self.lasting or failure

    @property
    def failure(self) -> InfrastructureFailure | None:
        """Why no verdict of this grading can be trusted: the first request that was not answered."""
        return self.lasting or self._failure


_METER: Final[ContextVar[Meter | None]] = ContextVar("meter", default=None)


def present_meter() -> Meter | None:
    """The meter of the attempt that this task belongs to; None: it belongs to none, and may ask nothing."""
    return _METER.get()


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """What is asked within belongs to this attempt."""
    token = _METER.set(meter)
    try:
        yield
    finally:
        _METER.reset(token)
