"""Where an episode's time goes: `clock.span(stage)` blocks in, `Span` records out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from sandmill.rollouts.trajectory import Span, Stage


class Timeline:
    """Collects the spans of one episode. Times are seconds since `origin` (a `time.perf_counter()` reading shared by the run)."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, stage: Stage) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append(Span(stage=stage, start_s=start - self._origin, end_s=time.perf_counter() - self._origin))

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)
