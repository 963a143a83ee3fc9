"""The row of one attempt, and sums over rows. Failures and repeated attempts have rows like any other.

A row is appended to the run folder's ledger stream when the attempt ends and before anything it returned is parsed, so that money spent
on an attempt that later fails is still on the books.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from sandmill.errors import RunIncompatible

SCHEMA_VERSION = 1


class Activity(enum.StrEnum):
    """What the time of a row was for."""

    EPISODE = "episode"
    """One attempt at one task of a training step, its grading included."""
    EVALUATION = "evaluation"
    """One attempt at one held-out task, its grading included."""
    TRAINING = "training"
    """The update of one step."""
    WARM_START = "warm-start"
    JUDGE = "judge"
    """One request of a grader to a judge."""


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt. `cost_microusd` None: the price is unknown (shown as unknown, never as zero)."""

    run: str
    activity: Activity
    step: int
    group: str = ""
    index: int = 0
    attempt: int = 0
    """0 for the first try of this index, then 1, 2, ..."""
    start: int = 0
    """How many times the run had been resumed: a step that is repeated after a kill was paid for twice."""
    outcome: str
    """`graded`, `agent-limited`, `infrastructure-failure`, ... for people and counts."""
    machine_s: float = 0.0
    sandbox_s: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    judge: str = ""
    """The judge's name, in a row of one."""
    latency_s: float = 0.0
    """How long a judge was waited for; nobody's time by itself."""
    cost_microusd: int | None
    schema_version: int = SCHEMA_VERSION


class Spend(msgspec.Struct, frozen=True, kw_only=True):
    """A sum over rows: what is known, and how many rows have no known cost."""

    known_microusd: int = 0
    unknown_rows: int = 0
    rows: int = 0

    @property
    def microusd(self) -> int | None:
        """The total, or None when any part of it is unknown."""
        return None if self.unknown_rows else self.known_microusd

    def plus(self, row: LedgerRow) -> Spend:
        """With one more row."""
        unknown = row.cost_microusd is None
        return Spend(
            known_microusd=self.known_microusd + (row.cost_microusd or 0), unknown_rows=self.unknown_rows + unknown, rows=self.rows + 1
        )


def spend(rows: Iterable[LedgerRow]) -> Spend:
    """The sum of rows; grouping them first and adding the sums gives the same."""
    summed = Spend()
    for row in rows:
        summed = summed.plus(row)
    return summed


def read_ledger(path: Path) -> Iterator[LedgerRow]:
    """The rows of a ledger file, a torn last line left out. Raises RunIncompatible, naming the line, for anything else that is no row."""
    decoder = msgspec.json.Decoder(LedgerRow)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RunIncompatible(f"{path}, line {number}: not a ledger row of this version: {error}") from error
            if row.schema_version != SCHEMA_VERSION:
                raise RunIncompatible(f"{path}, line {number}: ledger version {row.schema_version}, this program reads {SCHEMA_VERSION}")
            yield row
