"""Batched decoding of Llama-family models with slots of key-value cache. In: token ids per row; out: logits.

Every operation gives a row the same bits whatever its neighbours are: matrix products run on a multiple of 4 or 16 rows, attention is
one small product per row, head and block of keys (masked keys add exact zeros), and all else is row-wise or element-wise on sizes
without a vector remainder. tests/models/test_determinism.py holds this to account.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sandmill.models import llama
from sandmill.models.decoder import Chunk, Ints, Logits, round_up, whole_rows, zeros_on_demand
from sandmill.models.llama import FusedLayer, FusedLinear
from sandmill.models.products import product
from sandmill.models.twins import Histories

_SMALL_PRODUCT = 400


class LlamaDecoder:
    """Keys and values: (blocks, rows, kv_heads, block, head_dim) per layer, float32, resident only as far as they were written.

    All rows' first tokens lie together, then all rows' next: a step over many short rows streams memory instead of skipping
    through it, which is four times faster.
    """

    def __init__(self, model: Any, *, rows: int, context_length: int, split: int | None = None) -> None:
        """`split`: also remember what enters this layer, for `lowered`."""
        self._model = model
        self._shape = llama.shape_of(model)
        self._block = _block_length(self._shape, context_length)
        context = round_up(context_length, self._block)
        self._rotations_TP = llama.rotations(model, context)
        self._base: list[FusedLayer] = []
        self._layers: list[_Layer] = []
        sizes = (context // self._block, rows, self._shape.kv_heads, self._block, self._shape.head_dim)
        self._keys = [zeros_on_demand(*sizes) for _ in range(self._shape.layers)]
        self._values = [zeros_on_demand(*sizes) for _ in range(self._shape.layers)]
        self._lengths: Ints = np.zeros(rows, np.int64)
        self._histories = Histories(rows, context)
        self._split = split
        self._lowered_RTD = None if split is None else zeros_on_demand(rows, context, self._shape.width)
        self._ids_RT: Ints = np.zeros((rows, 0 if split is None else context), np.int64)
        self.refresh()

    @property
    def lengths(self) -> Ints:
        return self._lengths

    @torch.no_grad()
    def refresh(self) -> None:
        base = llama.frozen_layers(self._model)
        if base is not self._base:
            self._base = base
            self._layers = [_Layer(layer) for layer in base]
            self._head = product(FusedLinear(llama.head(self._model), None, None, None))
        for index in llama.adapted_indices(self._model):
            self._layers[index].adapt(llama.adapted_layer(self._model, index, self._shape, self._base[index]))
        shape = self._shape
        whole = whole_rows(shape.width, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
        self._row_multiple = max(whole, self._head.row_multiple, *(layer.row_multiple for layer in self._layers))
        self._embedding = llama.embedding(self._model).detach()
        self._norm = llama.final_norm(self._model).detach()

    def copy(self, source: int, targets: Ints, length: int) -> None:
        index = torch.from_numpy(targets)
        with torch.inference_mode():
            for cache in (*self._keys, *self._values):
                for block in cache[: -(-length // self._block)]:
                    block[index] = block[source].clone()
            if self._lowered_RTD is not None:
                self._lowered_RTD[index, :length] = self._lowered_RTD[source, :length].clone()
                self._ids_RT[targets, :length] = self._ids_RT[source, :length]
        self._lengths[targets] = length
        self._histories.copy(source, targets, length)

    def lowered(self, row: int) -> tuple[tuple[int, ...], Tensor]:
        """A row's token ids and (their number, width) what entered layer `split` for each; copies."""
        if self._lowered_RTD is None:
            raise ValueError("this decoder was made without a split")
        length = int(self._lengths[row])
        return tuple(self._ids_RT[row, :length].tolist()), self._lowered_RTD[row, :length].clone()

    def clear(self, row: int) -> None:
        self._lengths[row] = 0

    @torch.inference_mode()
    def extend(self, chunks: Sequence[Chunk]) -> Logits:
        batch = _Batch(chunks, self._lengths, self._histories, self._shape, self._block, self._row_multiple)
        x = functional.embedding(batch.ids_N, self._embedding)
        rotations_N = self._rotations_TP[batch.positions_N].unsqueeze(1)
        for index, layer in enumerate(self._layers):
            if index == self._split and self._lowered_RTD is not None:
                self._lowered_RTD[batch.rows_M, batch.positions_M] = batch.to_rows(x)
                self._ids_RT[batch.rows_M.numpy(), batch.positions_M.numpy()] = batch.to_rows(batch.ids_N).numpy()
            qkv = layer.qkv(functional.rms_norm(x, (self._shape.width,), eps=self._shape.eps))
            attended = self._attend(index, layer, qkv, batch, rotations_N)
            x = layer.out.added_to(x, attended)
            gate, up = layer.gate_up(functional.rms_norm(x, (self._shape.width,), eps=self._shape.eps)).chunk(2, -1)
            x = layer.down.added_to(x, functional.silu(gate).mul_(up))
        for chunk in chunks:
            self._lengths[chunk.rows_A] += chunk.counts_A
        last = functional.rms_norm(x[batch.last_D], (self._shape.width,), self._norm, self._shape.eps)
        return Logits(self._head(last), batch.of_A)

    def _attend(self, index: int, layer: _Layer, qkv: Tensor, batch: _Batch, rotations_N: Tensor) -> Tensor:
        shape = self._shape
        rotated = shape.heads + shape.kv_heads
        heads = qkv.view(qkv.shape[0], rotated + shape.kv_heads, shape.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = functional.rms_norm(heads[:, : shape.heads], (shape.head_dim,), layer.q_norm, shape.eps)
            k = functional.rms_norm(heads[:, shape.heads : rotated], (shape.head_dim,), layer.k_norm, shape.eps)
            heads = torch.cat([q, k, heads[:, rotated:]], 1)
        torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2))[:, :rotated].mul_(rotations_N)
        keys, values = self._keys[index], self._values[index]
        place = (batch.block_M, batch.rows_M, slice(None), batch.offset_M)
        keys[place], values[place] = batch.to_rows(heads[:, shape.heads :]).chunk(2, 1)
        parts = [self._attend_segment(segment, heads[:, : shape.heads], keys, values) for segment in batch.segments]
        if len(parts) == 1 and len(parts[0]) == len(qkv):
            return parts[0]
        attended = qkv.new_zeros(len(qkv), shape.heads * shape.head_dim)
        torch.cat(parts, out=attended[: batch.count])
        return attended

    def _attend_segment(self, segment: _Segment, q_N: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = segment.spread(q_N)
        scores = [torch.bmm(q, segment.picked(block).transpose(1, 2)) for block in keys[: segment.blocks]]
        joined = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        mask = segment.mask
        weights = (joined.view(mask.shape[0], -1, *mask.shape[2:]) + mask).softmax(-1).view_as(joined)
        parts = torch.split(weights, self._block, -1)
        attended = torch.bmm(parts[0], segment.picked(values[0]))
        for part, block in zip(parts[1:], values[1 : segment.blocks], strict=True):
            attended.baddbmm_(part, segment.picked(block))
        return segment.gather(attended)


class _Layer:
    """A layer's effective matrices."""

    def __init__(self, base: FusedLayer) -> None:
        self.q_norm, self.k_norm = base.q_norm, base.k_norm
        self.adapt(base)

    def adapt(self, layer: FusedLayer) -> None:
        self.qkv, self.out = product(layer.qkv), product(layer.out)
        self.gate_up, self.down = product(layer.gate_up), product(layer.down)
        self.row_multiple = max(each.row_multiple for each in (self.qkv, self.out, self.gate_up, self.down))


def _block_length(shape: llama.LlamaShape, context_length: int) -> int:
    """Keys per block: short for short contexts. At least so many that no product has fewer than 400 multiply-adds: torch does
    those by another kernel, whose last bits differ."""
    usual = 32 if context_length <= 256 else 128
    return max(usual, round_up(-(-_SMALL_PRODUCT // (shape.group * shape.head_dim))))


class _Batch:
    """One call's tokens, chunk after chunk, laid end to end (N, padded to a `multiple`): products run over all of them at once,
    attention chunk by chunk, so that its shapes are those of the chunk alone. Rows that compute the same are there once; what comes of
    it goes to all of them: M tokens, `rows_M` and `positions_M` say where to."""

    def __init__(
        self, chunks: Sequence[Chunk], lengths: Ints, histories: Histories, shape: llama.LlamaShape, block: int, multiple: int
    ) -> None:
        self.segments: list[_Segment] = []
        ids, positions, last = [], [], []
        of, rows, places, sources = [], [], [], []
        self.count = distinct = 0
        for chunk in chunks:
            starts_A = lengths[chunk.rows_A]
            leaders, leader_A = histories.extend(chunk, starts_A)
            segment = _Segment(Chunk(*(part[leaders] for part in chunk)), starts_A[leaders], self.count, shape, block)
            begins = self.count + np.cumsum(chunk.counts_A[leaders]) - chunk.counts_A[leaders]
            a_M, column_M = np.nonzero(np.arange(chunk.ids_AC.shape[1]) < chunk.counts_A[:, None])
            self.segments.append(segment)
            ids.append(segment.ids)
            positions.append(segment.positions)
            last.append(begins + chunk.counts_A[leaders] - 1)
            of.append(distinct + leader_A)
            rows.append(chunk.rows_A[a_M])
            places.append(starts_A[a_M] + column_M)
            sources.append(begins[leader_A[a_M]] + column_M)
            self.count += segment.count
            distinct += len(leaders)
        padding = np.zeros(round_up(self.count, multiple) - self.count, np.int64)
        self.ids_N = torch.from_numpy(np.concatenate([*ids, padding]))
        self.positions_N = torch.from_numpy(np.concatenate([*positions, padding]))
        self.last_D = torch.from_numpy(np.pad(np.concatenate(last), (0, round_up(distinct, multiple) - distinct), mode="edge"))
        self.of_A = np.concatenate(of)
        self.rows_M, self.positions_M = torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(places))
        self.block_M, self.offset_M = (torch.from_numpy(part) for part in np.divmod(self.positions_M.numpy(), block))
        self._sources_M = None if len(self.rows_M) == self.count else torch.from_numpy(np.concatenate(sources))

    def to_rows(self, x: Tensor) -> Tensor:
        """(N, ...) -> (M, ...)."""
        return x[: self.count] if self._sources_M is None else x.index_select(0, self._sources_M)


class _Segment:
    """One chunk's tokens (`start` to `start + count` of the batch), and the way to and from rows of attention.

    Attention runs over S slots: all rows up to the last one used where most of them are in the chunk, which spares copying their
    keys and values, else the A rows of the chunk. `mask`: float (S, 1, C, keys), 0 where a query may look and -inf where not;
    (S, 1, group x C, keys) where C > 1.
    """

    def __init__(self, chunk: Chunk, starts_A: Ints, start: int, shape: llama.LlamaShape, block: int) -> None:
        rows_A, ids_AC, counts_A = chunk
        self._shape = shape
        self._columns = ids_AC.shape[1]
        self._start = start
        self.count = int(counts_A.sum())
        self.blocks = -(-int((starts_A + counts_A).max()) // block)
        span = int(rows_A.max()) + 1
        direct = 4 * len(rows_A) >= 3 * span
        self._slots = span if direct else len(rows_A)
        self._row_index = None if direct else torch.from_numpy(rows_A)
        slot_A = rows_A if direct else np.arange(len(rows_A))
        valid_AC = np.arange(self._columns) < counts_A[:, None]
        a_N, column_N = np.nonzero(valid_AC)
        self.ids, self.positions = ids_AC[valid_AC], starts_A[a_N] + column_N
        limits_SC = np.zeros((self._slots, self._columns), np.int64)
        limits_SC[slot_A] = starts_A[:, None] + np.arange(self._columns)
        self.mask = self._masked(torch.from_numpy(limits_SC), self.blocks * block)
        self._slot_N, self._column_N = torch.from_numpy(slot_A[a_N]), torch.from_numpy(column_N)
        self._in_order = self._columns == 1 and self._slots == len(rows_A) and bool((slot_A == np.arange(len(rows_A))).all())

    def _masked(self, limits_SC: Tensor, keys: int) -> Tensor:
        ahead = torch.arange(keys) > limits_SC[:, None, :, None]
        mask = torch.zeros(ahead.shape).masked_fill_(ahead, float("-inf"))
        return mask.repeat(1, 1, self._shape.group, 1) if self._columns > 1 else mask

    def picked(self, block: Tensor) -> Tensor:
        """(rows, kv_heads, block, D) -> (S x kv_heads, block, D)."""
        rows = block[: self._slots] if self._row_index is None else block.index_select(0, self._row_index)
        return rows.flatten(0, 1)

    def spread(self, q: Tensor) -> Tensor:
        """(N, heads, D) -> (S x kv_heads, group x C, D); places without a token stay zero."""
        kv_heads, group, dim = self._shape.kv_heads, self._shape.group, self._shape.head_dim
        q = q[self._start : self._start + self.count]
        if self._in_order:
            return q.reshape(-1, group, dim)
        out = q.new_zeros(self._slots, self._columns, kv_heads * group, dim)
        out[self._slot_N, self._column_N] = q
        return out.view(self._slots, self._columns, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(-1, group * self._columns, dim)

    def gather(self, attended: Tensor) -> Tensor:
        """(S x kv_heads, group x C, D) -> (tokens of the chunk, heads x D)."""
        kv_heads, group, dim = self._shape.kv_heads, self._shape.group, self._shape.head_dim
        if self._in_order:
            return attended.view(self.count, -1)
        rows = attended.view(-1, kv_heads, group, self._columns, dim).permute(0, 3, 1, 2, 4)
        return rows[self._slot_N, self._column_N].reshape(self.count, -1)
