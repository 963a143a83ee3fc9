"""Counts of what graders did in; a sentence when they are silently useless out.

A grader that is never called, always fails, or gives every episode the same zero produces no error anywhere else.
"""

from __future__ import annotations

from sandmill.environments.task import Boundary, InfrastructureFailure, Verdict

NEVER_CALLED_AFTER = 32
"""Finished episodes without one call of the grader."""
ALL_ZERO_AFTER = 256
"""Graded episodes whose rewards are all exactly zero."""


class GraderHealth:
    """Counters of one run. `episodes` finished, of which `calls` reached the grader; `graded` of these have a reward, `nonzero` not 0."""

    def __init__(self, max_failures_in_a_row: int = 64) -> None:
        self.max_failures_in_a_row = max_failures_in_a_row
        self.episodes = 0
        self.calls = 0
        self.failures = 0
        self.failures_in_a_row = 0
        self.graded = 0
        self.nonzero = 0
        self.last_reason = ""

    def record(self, verdict: Verdict, *, called: bool) -> None:
        """One finished episode; `called` says whether its grader was called at all."""
        self.episodes += 1
        self.calls += called
        if not isinstance(verdict, InfrastructureFailure):
            self.failures_in_a_row = 0
            self.graded += 1
            self.nonzero += verdict.reward != 0.0
        elif verdict.boundary in (Boundary.GRADER, Boundary.JUDGE, Boundary.MCP):
            self.failures += 1
            self.failures_in_a_row += 1
            self.last_reason = verdict.reason

    def broken(self) -> str | None:
        """Why the run must stop, in one sentence, or None: the grader failed too often in a row, or is never called."""
        if self.failures_in_a_row >= self.max_failures_in_a_row:
            return f"the grader failed {self.failures_in_a_row} times in a row, the last time with: {self.last_reason}"
        if self.episodes >= NEVER_CALLED_AFTER and self.calls == 0:
            return (
                f"{self.episodes} episodes have ended and the grader was never called; check how episodes end before reading any pass rate"
            )
        return None

    def alarm(self) -> str | None:
        """`broken()`, or a warning in one sentence that every reward so far was exactly zero."""
        if broken := self.broken():
            return broken
        if self.graded >= ALL_ZERO_AFTER and self.nonzero == 0:
            return f"all {self.graded} rewards so far are exactly 0: the task may be too hard, or the grader never accepts an answer"
        return None
