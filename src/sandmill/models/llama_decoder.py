"""Batched decoding of Llama-family models with slots of key-value cache. In: token ids per row; out: logits.

Every operation gives a row the same bits whatever its neighbours are: matrix products run on a multiple of 16 rows, attention is
one small product per row, head and block of keys (masked keys add exact zeros), and all else is row-wise or element-wise on sizes
without a vector remainder. tests/models/test_determinism.py holds this to account.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sandmill.models import llama
from sandmill.models.decoder import Ints, round_up, zeros_on_demand
from sandmill.models.llama import FusedLayer, FusedLinear

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
        for index in llama.adapted_indices(self._model):
            self._layers[index].adapt(llama.adapted_layer(self._model, index, self._shape, self._base[index]))
        self._embedding = llama.embedding(self._model).detach()
        self._head = llama.head(self._model).detach()
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

    def lowered(self, row: int) -> tuple[tuple[int, ...], Tensor]:
        """A row's token ids and (their number, width) what entered layer `split` for each; copies."""
        if self._lowered_RTD is None:
            raise ValueError("this decoder was made without a split")
        length = int(self._lengths[row])
        return tuple(self._ids_RT[row, :length].tolist()), self._lowered_RTD[row, :length].clone()

    def clear(self, row: int) -> None:
        self._lengths[row] = 0

    @torch.inference_mode()
    def extend(self, rows_A: Ints, ids_AC: Ints, counts_A: Ints) -> Tensor:
        batch = _Batch(rows_A, ids_AC, counts_A, self._lengths[rows_A], self._shape, self._block)
        x = functional.embedding(batch.ids_N, self._embedding)
        rotations_N = self._rotations_TP[batch.positions_N].unsqueeze(1)
        mask = batch.mask()
        for index, layer in enumerate(self._layers):
            if index == self._split and self._lowered_RTD is not None:
                positions = batch.positions_N[: batch.count]
                self._lowered_RTD[batch.rows_N, positions] = x[: batch.count]
                self._ids_RT[batch.rows_N.numpy(), positions.numpy()] = batch.ids_N[: batch.count].numpy()
            qkv = _linear(functional.rms_norm(x, (self._shape.width,), eps=self._shape.eps), layer.qkv)
            attended = self._attend(index, layer, qkv, batch, rotations_N, mask)
            x = _add_linear(x, attended, layer.out)
            gate, up = _linear(functional.rms_norm(x, (self._shape.width,), eps=self._shape.eps), layer.gate_up).chunk(2, -1)
            x = _add_linear(x, functional.silu(gate).mul_(up), layer.down)
        self._lengths[rows_A] += counts_A
        last = functional.rms_norm(x[batch.last_A], (self._shape.width,), self._norm, self._shape.eps)
        return functional.linear(last, self._head)

    def _attend(self, index: int, layer: _Layer, qkv: Tensor, batch: _Batch, rotations_N: Tensor, mask: Tensor) -> Tensor:
        shape = self._shape
        rotated = shape.heads + shape.kv_heads
        heads = qkv.view(qkv.shape[0], rotated + shape.kv_heads, shape.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = functional.rms_norm(heads[:, : shape.heads], (shape.head_dim,), layer.q_norm, shape.eps)
            k = functional.rms_norm(heads[:, shape.heads : rotated], (shape.head_dim,), layer.k_norm, shape.eps)
            heads = torch.cat([q, k, heads[:, rotated:]], 1)
        torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2))[:, :rotated].mul_(rotations_N)
        keys, values = self._keys[index], self._values[index]
        place = (batch.block_N, batch.rows_N, slice(None), batch.offset_N)
        keys[place] = heads[: batch.count, shape.heads : rotated]
        values[place] = heads[: batch.count, rotated:]
        q = batch.spread(heads[:, : shape.heads])
        scores = [torch.bmm(q, batch.picked(block).transpose(1, 2)) for block in keys[: batch.blocks]]
        joined = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        weights = (joined.view(mask.shape[0], -1, *mask.shape[2:]) + mask).softmax(-1).view_as(joined)
        parts = torch.split(weights, self._block, -1)
        attended = torch.bmm(parts[0], batch.picked(values[0]))
        for part, block in zip(parts[1:], values[1 : batch.blocks], strict=True):
            attended.baddbmm_(part, batch.picked(block))
        return batch.gather(attended)


class _Layer:
    """A layer's effective matrices; adapted ones own their storage, others share the base's."""

    def __init__(self, base: FusedLayer) -> None:
        self.qkv, self.out, self.gate_up, self.down = base.qkv, base.out, base.gate_up, base.down
        self.q_norm, self.k_norm = base.q_norm, base.k_norm

    def adapt(self, adapted: FusedLayer) -> None:
        self.qkv, self.out = _merge(adapted.qkv), _merge(adapted.out)
        self.gate_up, self.down = _merge(adapted.gate_up), _merge(adapted.down)


def _block_length(shape: llama.LlamaShape, context_length: int) -> int:
    """Keys per block: short for short contexts. At least so many that no product has fewer than 400 multiply-adds: torch does
    those by another kernel, whose last bits differ."""
    usual = 32 if context_length <= 256 else 128
    return max(usual, round_up(-(-_SMALL_PRODUCT // (shape.group * shape.head_dim))))


def _merge(linear: FusedLinear) -> FusedLinear:
    return FusedLinear(linear.merged(), linear.bias, None, None)


class _Batch:
    """One call's tokens laid end to end (N, padded to a multiple of 16), and the way to and from rows of attention.

    Attention runs over S slots: all rows up to the last one used where most of them are in the call, which spares copying their
    keys and values, else the A rows of the call.
    """

    def __init__(self, rows_A: Ints, ids_AC: Ints, counts_A: Ints, starts_A: Ints, shape: llama.LlamaShape, block: int) -> None:
        self._shape = shape
        self._columns = ids_AC.shape[1]
        self.count = int(counts_A.sum())
        self.blocks = -(-int((starts_A + counts_A).max()) // block)
        self._keys = self.blocks * block
        span = int(rows_A.max()) + 1
        self._direct = 4 * len(rows_A) >= 3 * span
        self._slots = span if self._direct else len(rows_A)
        self._row_index = None if self._direct else torch.from_numpy(rows_A)
        slot_A = rows_A if self._direct else np.arange(len(rows_A))
        valid_AC = np.arange(self._columns) < counts_A[:, None]
        a_N, column_N = np.nonzero(valid_AC)
        positions_N = np.zeros(round_up(self.count), np.int64)
        positions_N[: self.count] = starts_A[a_N] + column_N
        ids_N = np.zeros(len(positions_N), np.int64)
        ids_N[: self.count] = ids_AC[valid_AC]
        last_A = np.zeros(round_up(len(rows_A)), np.int64)
        last_A[: len(rows_A)] = np.cumsum(counts_A) - 1
        limits_SC = np.zeros((self._slots, self._columns), np.int64)
        limits_SC[slot_A] = starts_A[:, None] + np.arange(self._columns)
        self.ids_N, self.positions_N, self.last_A = torch.from_numpy(ids_N), torch.from_numpy(positions_N), torch.from_numpy(last_A)
        self.rows_N = torch.from_numpy(rows_A[a_N])
        self.block_N, self.offset_N = (torch.from_numpy(part) for part in np.divmod(positions_N[: self.count], block))
        self._slot_N, self._column_N = torch.from_numpy(slot_A[a_N]), torch.from_numpy(column_N)
        self._limits_SC = torch.from_numpy(limits_SC)
        self._in_order = self._columns == 1 and self._slots == len(rows_A) and bool((slot_A == np.arange(len(rows_A))).all())

    def mask(self) -> Tensor:
        """float (S, 1, C, keys): 0 where a query may look, -inf where not; (S, 1, group x C, keys) where C > 1."""
        ahead = torch.arange(self._keys) > self._limits_SC[:, None, :, None]
        mask = torch.zeros(ahead.shape).masked_fill_(ahead, float("-inf"))
        return mask.repeat(1, 1, self._shape.group, 1)

    def picked(self, block: Tensor) -> Tensor:
        """(rows, kv_heads, block, D) -> (S x kv_heads, block, D)."""
        rows = block[: self._slots] if self._row_index is None else block.index_select(0, self._row_index)
        return rows.flatten(0, 1)

    def spread(self, q: Tensor) -> Tensor:
        """(N, heads, D) -> (S x kv_heads, group x C, D); places without a token stay zero."""
        kv_heads, group, dim = self._shape.kv_heads, self._shape.group, self._shape.head_dim
        if self._in_order:
            return q[: self.count].reshape(-1, group, dim)
        out = q.new_zeros(self._slots, self._columns, kv_heads * group, dim)
        out[self._slot_N, self._column_N] = q[: self.count]
        return out.view(self._slots, self._columns, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(-1, group * self._columns, dim)

    def gather(self, attended: Tensor) -> Tensor:
        """(S x kv_heads, group x C, D) -> (N padded, heads x D)."""
        kv_heads, group, dim = self._shape.kv_heads, self._shape.group, self._shape.head_dim
        if self._in_order and len(self.ids_N) == self.count:
            return attended.view(self.count, -1)
        out = attended.new_zeros(len(self.ids_N), kv_heads * group * dim)
        rows = attended.view(-1, kv_heads, group, self._columns, dim).permute(0, 3, 1, 2, 4)
        out[: self.count] = rows[self._slot_N, self._column_N].reshape(self.count, -1)
        return out


def _linear(x: Tensor, linear: FusedLinear) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _add_linear(x: Tensor, y: Tensor, linear: FusedLinear) -> Tensor:
    added = torch.addmm(x, y, linear.weight.t())
    return added if linear.bias is None else added.add_(linear.bias)
