"""Batched decoding of Llama-family models with slots of key-value cache. In: token ids per row; out: logits.

Every operation gives a row the same bits whatever its neighbours are: matrix products run on a multiple of 16 rows, attention is
one small product per row and head over a key length padded to a multiple of 16 (masked keys add exact zeros), and all else is
row-wise or element-wise on sizes without a vector remainder. tests/models/test_determinism.py holds this to account.
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
    """Keys and values: (rows, kv_heads, context, head_dim) per layer, float32, resident only as far as they were written."""

    def __init__(self, model: Any, *, rows: int, context_length: int) -> None:
        self._model = model
        self._shape = llama.shape_of(model)
        self._context = round_up(max(context_length, _least_keys(self._shape)))
        self._rotations_TP = llama.rotations(model, self._context)
        self._base: list[FusedLayer] = []
        self._base_version = -1
        self._layers: list[_Layer] = []
        sizes = (rows, self._shape.kv_heads, self._context, self._shape.head_dim)
        self._keys = [zeros_on_demand(*sizes) for _ in range(self._shape.layers)]
        self._values = [zeros_on_demand(*sizes) for _ in range(self._shape.layers)]
        self._lengths: Ints = np.zeros(rows, np.int64)
        self.refresh()

    @property
    def lengths(self) -> Ints:
        return self._lengths

    @torch.no_grad()
    def refresh(self) -> None:
        version = llama.base_version(self._model)
        if version != self._base_version:
            self._base = [llama.frozen_layer(self._model, index, self._shape) for index in range(self._shape.layers)]
            self._layers = [_Layer(layer) for layer in self._base]
            self._base_version = version
        for index in llama.adapted_indices(self._model):
            self._layers[index].adapt(llama.adapted_layer(self._model, index, self._shape, self._base[index]))
        self._embedding = llama.embedding(self._model).detach()
        self._head = llama.head(self._model).detach()
        self._norm = llama.final_norm(self._model).detach()

    def copy(self, source: int, targets: Ints, length: int) -> None:
        index = torch.from_numpy(targets)
        with torch.inference_mode():
            for cache in (*self._keys, *self._values):
                cache[index, :, :length] = cache[source, :, :length]
        self._lengths[targets] = length

    def clear(self, row: int) -> None:
        self._lengths[row] = 0

    @torch.inference_mode()
    def extend(self, rows_A: Ints, ids_AC: Ints, counts_A: Ints) -> Tensor:
        batch = _Batch(rows_A, ids_AC, counts_A, self._lengths[rows_A], self._shape)
        x = functional.embedding(batch.ids_N, self._embedding)
        rotations_N = self._rotations_TP[batch.positions_N].unsqueeze(1)
        key_rows = batch.key_rows()
        mask = batch.mask(key_rows)
        for index, layer in enumerate(self._layers):
            qkv = _linear(functional.rms_norm(x, (self._shape.width,), eps=self._shape.eps), layer.qkv)
            attended = self._attend(index, layer, qkv, batch, rotations_N, mask, key_rows)
            x = _add_linear(x, attended, layer.out)
            gate, up = _linear(functional.rms_norm(x, (self._shape.width,), eps=self._shape.eps), layer.gate_up).chunk(2, -1)
            x = _add_linear(x, functional.silu(gate).mul_(up), layer.down)
        self._lengths[rows_A] += counts_A
        last = functional.rms_norm(x[batch.last_A], (self._shape.width,), self._norm, self._shape.eps)
        return functional.linear(last, self._head)

    def _attend(
        self, index: int, layer: _Layer, qkv: Tensor, batch: _Batch, rotations_N: Tensor, mask: Tensor, key_rows: Tensor | None
    ) -> Tensor:
        shape = self._shape
        rotated = shape.heads + shape.kv_heads
        heads = qkv.view(qkv.shape[0], rotated + shape.kv_heads, shape.head_dim)
        qk = heads[:, :rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = functional.rms_norm(qk[:, : shape.heads], (shape.head_dim,), layer.q_norm, shape.eps)
            k = functional.rms_norm(qk[:, shape.heads :], (shape.head_dim,), layer.k_norm, shape.eps)
            qk = torch.cat([q, k], 1)
        qk = torch.view_as_real(torch.view_as_complex(qk.reshape(*qk.shape[:2], -1, 2)).mul(rotations_N)).flatten(-2)
        n = batch.count
        keys, values = self._keys[index], self._values[index]
        keys[batch.rows_N, :, batch.positions_N[:n]] = qk[:n, shape.heads :]
        values[batch.rows_N, :, batch.positions_N[:n]] = heads[:n, rotated:]
        keys, values = keys[:, :, : batch.key_length], values[:, :, : batch.key_length]
        if key_rows is None:
            keys, values = keys[: batch.span], values[: batch.span]
        else:
            keys, values = keys.index_select(0, key_rows), values.index_select(0, key_rows)
        q = batch.spread(qk[:, : shape.heads], key_rows)
        weights = torch.matmul(q, keys.transpose(2, 3)).add_(mask).softmax(-1)
        return batch.gather(torch.matmul(weights, values), key_rows)


class _Layer:
    """A layer's effective matrices; adapted ones own their storage, others share the base's."""

    def __init__(self, base: FusedLayer) -> None:
        self.qkv, self.out, self.gate_up, self.down = base.qkv, base.out, base.gate_up, base.down
        self.q_norm, self.k_norm = base.q_norm, base.k_norm

    def adapt(self, adapted: FusedLayer) -> None:
        self.qkv, self.out = _merge(adapted.qkv), _merge(adapted.out)
        self.gate_up, self.down = _merge(adapted.gate_up), _merge(adapted.down)


def _least_keys(shape: llama.LlamaShape) -> int:
    """torch multiplies matrices of fewer than 400 multiply-adds by another kernel, whose last bits differ."""
    return -(-_SMALL_PRODUCT // (shape.group * shape.head_dim))


def _merge(linear: FusedLinear) -> FusedLinear:
    return FusedLinear(linear.merged(), linear.bias, None, None)


class _Batch:
    """One call's tokens laid end to end (N, padded to a multiple of 16), and the way to and from rows."""

    def __init__(self, rows_A: Ints, ids_AC: Ints, counts_A: Ints, starts_A: Ints, shape: llama.LlamaShape) -> None:
        self._shape = shape
        self._rows = rows_A
        self._columns = ids_AC.shape[1]
        self._counts = counts_A
        self.span = int(rows_A.max()) + 1
        self.count = int(counts_A.sum())
        self.key_length = round_up(max(int((starts_A + counts_A).max()), _least_keys(shape)))
        columns_C = np.arange(self._columns)
        valid_AC = columns_C < counts_A[:, None]
        row_index_N, column_N = np.nonzero(valid_AC)
        padded = round_up(self.count)
        ids_N, positions_N = np.zeros((2, padded), np.int64)
        ids_N[: self.count] = ids_AC[valid_AC]
        positions_N[: self.count] = starts_A[row_index_N] + column_N
        self.ids_N = torch.from_numpy(ids_N)
        self.positions_N = torch.from_numpy(positions_N)
        self.rows_N = torch.from_numpy(rows_A[row_index_N])
        self._starts = starts_A
        self._slot_N = row_index_N
        self._column_N = column_N
        last = np.zeros(round_up(len(rows_A)), np.int64)
        last[: len(rows_A)] = np.cumsum(counts_A) - 1
        self.last_A = torch.from_numpy(last)

    def key_rows(self) -> Tensor | None:
        """None where attention runs over all rows up to the last one used, which spares copying their keys and values."""
        return None if 4 * len(self._rows) >= 3 * self.span else torch.from_numpy(self._rows)

    def mask(self, key_rows: Tensor | None) -> Tensor:
        """float (A or span, 1, group x C, keys): 0 where a query may look, -inf where not."""
        limits = self._starts[:, None] + np.arange(self._columns)
        if key_rows is None:
            spread = np.zeros((self.span, self._columns), np.int64)
            spread[self._rows] = limits
            limits = spread
        ahead = torch.arange(self.key_length) > torch.from_numpy(limits)[:, None, :, None]
        mask = torch.zeros(ahead.shape).masked_fill_(ahead, float("-inf"))
        return mask.repeat(1, 1, self._shape.group, 1) if self._columns > 1 else mask

    def spread(self, q: Tensor, key_rows: Tensor | None) -> Tensor:
        """(N, heads, D) -> (A or span, kv_heads, group x C, D); slots without a token stay zero."""
        kv_heads, group, dim = self._shape.kv_heads, self._shape.group, self._shape.head_dim
        if self._columns == 1 and key_rows is not None:
            return q[: self.count].reshape(-1, kv_heads, group, dim)
        size = self.span if key_rows is None else len(self._rows)
        out = q.new_zeros(size, self._columns, kv_heads * group, dim)
        out[self._slots(key_rows), torch.from_numpy(self._column_N)] = q[: self.count]
        return out.view(size, self._columns, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(size, kv_heads, -1, dim)

    def gather(self, attended: Tensor, key_rows: Tensor | None) -> Tensor:
        """(A or span, kv_heads, group x C, D) -> (N padded, heads x D)."""
        kv_heads, group, dim = self._shape.kv_heads, self._shape.group, self._shape.head_dim
        out = attended.new_zeros(len(self.ids_N), kv_heads * group * dim)
        if self._columns == 1 and key_rows is not None:
            out[: self.count] = attended.reshape(self.count, -1)
            return out
        rows = attended.view(-1, kv_heads, group, self._columns, dim).permute(0, 3, 1, 2, 4)
        out[: self.count] = rows[self._slots(key_rows), torch.from_numpy(self._column_N)].reshape(self.count, -1)
        return out

    def _slots(self, key_rows: Tensor | None) -> Tensor:
        return self.rows_N if key_rows is None else torch.from_numpy(self._slot_N)


def _linear(x: Tensor, linear: FusedLinear) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _add_linear(x: Tensor, y: Tensor, linear: FusedLinear) -> Tensor:
    added = torch.addmm(x, y, linear.weight.t())
    return added if linear.bias is None else added.add_(linear.bias)
