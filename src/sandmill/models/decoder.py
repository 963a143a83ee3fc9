"""The seam between the engine and a model's arithmetic: rows of key-value cache, extended by tokens, answering with logits.

A row's logits depend only on the weights and on the row's own sequence of chunks, bit for bit, whatever other rows and chunks are
in the call. Implementations: `llama_decoder` (fused, fast) and `transformers_decoder` (any causal model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

ROW_MULTIPLE = 16
"""Plain matrix products are done on a multiple of this many rows: below it, MKL picks kernels by row count and results change in the last
bit."""


class Chunk(NamedTuple):
    """Tokens for A rows, up to C for each: the first `counts_A[a]` (>= 1) of `ids_AC[a]` go to row `rows_A[a]`."""

    rows_A: Ints
    ids_AC: Ints
    counts_A: Ints


class Logits(NamedTuple):
    """What follows each of A rows: row a's logits are `distinct_DV[of_A[a]]`. Rows that hold the same bits may share theirs; there may be
    more behind the last one meant (padding)."""

    distinct_DV: torch.Tensor
    of_A: Ints


class Decoder(Protocol):
    """Axis letters: A rows, C token columns, D distinct rows, V vocabulary."""

    @property
    def lengths(self) -> Ints:
        """(rows,) tokens in each row's cache."""
        ...

    def extend(self, chunks: Sequence[Chunk]) -> Logits:
        """Appends the chunks, no row twice; returns the logits after each row's last token, rows in the order of the chunks."""
        ...

    def copy(self, source: int, targets: Ints, length: int) -> None:
        """Makes the first `length` tokens of row `source` the whole content of each target row."""
        ...

    def clear(self, row: int) -> None:
        """Empties a row."""
        ...

    def refresh(self) -> None:
        """Reads the weights again, adapters included. Cached keys and values stay as they are."""
        ...


def decoder_for(model: Any, *, rows: int, context_length: int, split: int | None = None) -> Decoder:
    """The fastest decoder that computes exactly this model. `split`: a decoder that can, remembers what enters that layer."""
    from sandmill.models import llama

    if llama.is_supported(model):
        from sandmill.models.llama_decoder import LlamaDecoder

        return LlamaDecoder(model, rows=rows, context_length=context_length, split=split)
    from sandmill.models.transformers_decoder import transformers_decoder

    return transformers_decoder(model, rows=rows, context_length=context_length)


def round_up(number: int, multiple: int = ROW_MULTIPLE) -> int:
    return -(-number // multiple) * multiple


def whole_rows(*sizes: int) -> int:
    """Of how many rows a multiple is needed for element-wise work on (rows, size), done by 1, 2, 4, ... threads, to leave no remainder of a
    vector: those few elements would be computed by other instructions, whose last bits differ."""
    return min(ROW_MULTIPLE, 256 // math.gcd(256, *sizes))


def zeros_on_demand(*sizes: int) -> torch.Tensor:
    """float32 zeros whose memory becomes resident only where it is used; aligned to 64 bytes, as a product's last bits may depend on it."""
    count = math.prod(sizes)
    raw = torch.from_numpy(np.zeros(count + 16, np.float32))
    skip = -raw.data_ptr() % 64 // 4
    return raw[skip : skip + count].view(sizes)
