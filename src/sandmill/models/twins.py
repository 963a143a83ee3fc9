"""Which rows of a decoder hold the same bits: chunks in; for each of its rows, the first row of the call that computes the same, out.

A row's bits depend only on the weights and on its own sequence of chunks (see `decoder`). So siblings that were copied from one prompt
and have sampled the same tokens since are computed once, until they part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sandmill.models.decoder import Chunk, Ints


class Twins(NamedTuple):
    """`leaders` (L,): places in the chunk of the rows to compute. `leader_A` (A,): which of them stands for each row."""

    leaders: Ints
    leader_A: Ints


class Histories:
    """A name for what each row holds up to each length: rows with one name at one length hold the same bits up to there.

    Names are never used twice, so that nothing has to be forgotten when a row is emptied or the weights change.
    """

    def __init__(self, rows: int, context_length: int) -> None:
        self._names: Ints = np.zeros((rows, context_length + 1), np.int64)
        self._next = 1

    def copy(self, source: int, targets: Ints, length: int) -> None:
        """The targets now hold the first `length` tokens of the source."""
        self._names[targets, : length + 1] = self._names[source, : length + 1]

    def extend(self, chunk: Chunk, starts_A: Ints) -> Twins:
        """Notes that the rows, `starts_A` tokens long, get the chunk."""
        rows_A, ids_AC, counts_A = chunk
        valid_AC = np.arange(ids_AC.shape[1]) < counts_A[:, None]
        keys = np.column_stack([self._names[rows_A, starts_A], starts_A, counts_A, np.where(valid_AC, ids_AC, 0)])
        known: dict[bytes, int] = {}
        leader_A = np.array([known.setdefault(key.tobytes(), len(known)) for key in keys], np.int64)
        a_N, column_N = np.nonzero(valid_AC)
        self._names[rows_A[a_N], starts_A[a_N] + column_N + 1] = self._next + leader_A[a_N]
        self._next += len(known)
        return Twins(np.unique(leader_A, return_index=True)[1], leader_A)
