"""One frozen row per attempt in, an append-only JSONL file out; failures and repeated attempts have rows like any other.

A row is written when the attempt ends and before anything it returned is parsed, so that money spent on an attempt that later fails
is still on the books. A row is one `write` of one line: after a kill at any point, only the last line can be torn, and it is cut off
when the ledger is next opened for writing.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from sandmill.errors import DiskFull, RunIncompatible

SCHEMA_VERSION = 1
_TAIL_BYTES = 1 << 16


class Activity(enum.StrEnum):
    """What the time of a row was for."""

    EPISODE = "episode"
    """One attempt at one task of a training step, its grading included."""
    EVALUATION = "evaluation"
    """One attempt at one held-out task, its grading included."""
    TRAINING = "training"
    """The update of one step."""
    WARM_START = "warm-start"


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


class Ledger:
    """The open ledger of one run folder; `spent` covers every row in the file, those before a resume too. One writer at a time."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file, cutting off a torn last line. Raises RunIncompatible and DiskFull."""
        self.path = path
        with _disk(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _cut_torn_line(self._file)
            self.spent = spend(read_ledger(path))
        except BaseException:
            os.close(self._file)
            raise
        self._closed = False

    def append(self, row: LedgerRow) -> None:
        """Adds a row in one write. Raises DiskFull; then nothing of the row is in the file."""
        line = msgspec.json.encode(row) + b"\n"
        before = os.fstat(self._file).st_size
        with _disk(self.path):
            try:
                written = os.write(self._file, line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self._file, before)
                raise
        self.spent = self.spent.plus(row)

    def sync(self) -> None:
        """Everything appended so far survives a power cut."""
        with _disk(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Syncs and closes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.sync()
        finally:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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


def _cut_torn_line(file: int) -> None:
    size = os.fstat(file).st_size
    end = size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns ENOSPC and EDQUOT into DiskFull that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(error.errno, f"no space left to write {path}; free some and resume the run") from error
