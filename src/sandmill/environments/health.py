"""Counts of what graders did in; a sentence when they are silently useless out.

A grader that is never called, always fails, or gives every episode the same zero produces no error anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandmill.environments.task import Boundary, InfrastructureFailure, Verdict

NEVER_CALLED_AFTER = 32
"""Finished episodes without one call of the grader."""
ALL_ZERO_AFTER = 256
"""Graded episodes whose rewards are all exactly zero."""
OFTEN, OFTEN_AFTER = 0.1, 64
"""A share of failed gradings that a person should know of, and the episodes after which it is one."""
MOSTLY_AFTER = 8
"""A grader that fails in most episodes is broken after this many times as many episodes as failures in a row would take."""


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
        """Why the run must stop, in one sentence, or None: the grader failed too often in a row or in all, or is never called."""
        if self.failures_in_a_row >= self.max_failures_in_a_row:
            return f"the grader failed {self.failures_in_a_row} times in a row, the last time with: {self.last_reason}"
        if self.episodes >= MOSTLY_AFTER * self.max_failures_in_a_row and 2 * self.failures > self.episodes:
            return f"the grader failed in {self.failures} of {self.episodes} episodes, the last time with: {self.last_reason}"
        if self.episodes >= NEVER_CALLED_AFTER and self.calls == 0:
            return (
                f"{self.episodes} episodes have ended and the grader was never called; check how episodes end before reading any pass rate"
            )
        return None

    def alarm(self) -> str | None:
        """`broken()`, or the first of `alarms()`."""
        return self.broken() or next(iter(self.alarms().values()), None)

    def alarms(self) -> Mapping[str, str]:
        """Warnings of one sentence each, by what they are about: every reward so far was exactly zero; many gradings failed."""
        found = {}
        if self.graded >= ALL_ZERO_AFTER and self.nonzero == 0:
            found["zero"] = (
                f"all {self.graded} rewards so far are exactly 0: the task may be too hard, or the grader never accepts an answer"
            )
        if self.episodes >= OFTEN_AFTER and self.failures > OFTEN * self.episodes:
            found["failures"] = (
                f"the grader failed in {self.failures} of {self.episodes} episodes so far, which count nowhere; the last time with: "
                f"{self.last_reason}"
            )
        return found
