"""The training forward of Llama-family models: token ids in, logits at selected positions out, differentiable.

Rows come padded or packed; products run over tokens, attention over rows. Gradients flow to whatever the given layers require:
adapters over frozen matrices, or the matrices themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sandmill.models.llama import FusedLayer, FusedLinear, LlamaShape
from sandmill.models.products import frozen_linear

_HEAD_CHUNK = 1 << 25
"""Logits (positions x vocabulary) held at once; beyond it they are computed in chunks and again in the backward pass."""


class Layout(NamedTuple):
    """How N tokens form rows. `slots` (B, T) are token indices with row ends repeated as filler; `places` (N,) index (B x T).
    Both None: the tokens are (B, T) already. Filler stands after a row's tokens, so causal attention never sees it."""

    rows: int
    columns: int
    positions: Tensor
    slots: Tensor | None
    places: Tensor | None

    @classmethod
    def padded(cls, rows: int, columns: int) -> Layout:
        return cls(rows, columns, torch.arange(columns).repeat(rows), None, None)

    @classmethod
    def packed(cls, count: int, starts: Sequence[int]) -> Layout:
        begin = torch.tensor(tuple(starts))
        lengths = torch.diff(begin, append=torch.tensor([count]))
        if len(begin) == 0 or int(begin[0]) != 0 or int(lengths.min()) < 1:
            raise ValueError("packed rows must start at 0, be non-empty and in order")
        columns = int(lengths.max())
        positions = torch.arange(count) - begin.repeat_interleave(lengths)
        slots = begin[:, None] + torch.minimum(torch.arange(columns), lengths[:, None] - 1)
        places = torch.arange(len(begin)).repeat_interleave(lengths) * columns + positions
        return cls(len(begin), columns, positions, slots, places)

    @classmethod
    def tree(cls, count: int, paths_BT: Tensor, lengths_B: Tensor) -> Layout:
        """Rows that share tokens: row b is the tokens `paths_BT[b, :lengths_B[b]]`, and a token stands at one position in all its rows."""
        rows, columns = paths_BT.shape
        inside = torch.arange(columns) < lengths_B[:, None]
        cells = torch.arange(rows * columns).view(rows, columns)[inside]
        tokens = paths_BT[inside]
        places = torch.full((count,), rows * columns).scatter_reduce(0, tokens, cells, "amin")
        positions = places % columns
        if int(places.max()) == rows * columns or not torch.equal(positions[tokens], cells % columns):
            raise ValueError("every token of a tree must lie on a path, at the same position of each of its paths")
        return cls(rows, columns, positions, paths_BT, places)

    def to_rows(self, x: Tensor) -> Tensor:
        """(N, ...) -> (B, T, ...)."""
        if self.slots is None:
            return x.view(self.rows, self.columns, *x.shape[1:])
        return x[self.slots]

    def to_tokens(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (N, ...)."""
        flat = x.flatten(0, 1)
        return flat if self.places is None else flat[self.places]


class Stack(NamedTuple):
    """Everything the forward needs. `merge` folds adapters into the matrices first (cheaper for small widths)."""

    shape: LlamaShape
    layers: Sequence[FusedLayer]
    norm: Tensor
    head: Tensor
    rotations_TP: Tensor
    merge: bool
    dropout: float = 0.0


def run_layers(stack: Stack, x: Tensor, layout: Layout, first: int, end: int) -> Tensor:
    """Hidden states (N, width) through layers `first` to `end` - 1."""
    shape = stack.shape
    rotations_N = stack.rotations_TP[layout.positions].unsqueeze(1)
    for layer in stack.layers[first:end]:
        qkv = _apply(stack, functional.rms_norm(x, (shape.width,), eps=shape.eps), layer.qkv)
        x = x + _apply(stack, _attend(shape, layer, qkv, layout, rotations_N), layer.out)
        gate, up = _apply(stack, functional.rms_norm(x, (shape.width,), eps=shape.eps), layer.gate_up).chunk(2, -1)
        x = x + _apply(stack, functional.silu(gate) * up, layer.down)
    return x


def score_hidden(stack: Stack, hidden_KD: Tensor, targets_K: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy (nats, float32) of softmax(logits / temperature) after the final norm and head."""
    size = max(1, _HEAD_CHUNK // stack.shape.vocabulary)
    if len(hidden_KD) <= size:
        return _score(hidden_KD, targets_K, stack.norm, stack.head, temperature, stack.shape.eps)
    parts = [
        checkpoint(_score, hidden, targets, stack.norm, stack.head, temperature, stack.shape.eps, use_reentrant=False)
        for hidden, targets in zip(torch.split(hidden_KD, size), torch.split(targets_K, size), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _score(hidden: Tensor, targets: Tensor, norm: Tensor, head: Tensor, temperature: float, eps: float) -> tuple[Tensor, Tensor]:
    logits = frozen_linear(functional.rms_norm(hidden, (hidden.shape[-1],), norm, eps), head, None)
    logprobs, entropies = _Distribution.apply(logits if temperature == 1.0 else logits / temperature, targets)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _Distribution(torch.autograd.Function):
    """log p(target) and entropy H of softmax(z), from logits z (K, V). With p = softmax(z):
    d log p_t / dz = onehot(t) - p and dH / dz = -p (log p + H). The backward pass needs one K x V matrix, where autograd keeps three."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = functional.log_softmax(logits, -1)
        entropies = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        ctx.save_for_backward(logprobs, entropies, targets)
        ctx.set_materialize_grads(False)
        return logprobs.gather(1, targets[:, None])[:, 0], entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        of_logprobs, of_entropies = gradients
        logprobs, entropies, targets = ctx.saved_tensors
        if of_entropies is not None:
            of_logits = (logprobs + entropies[:, None]).mul_(-of_entropies[:, None])
            if of_logprobs is not None:
                of_logits.sub_(of_logprobs[:, None])
            of_logits.mul_(logprobs.exp())
        elif of_logprobs is not None:
            of_logits = logprobs.exp().mul_(-of_logprobs[:, None])
        else:
            return None, None
        if of_logprobs is not None:
            of_logits.scatter_add_(1, targets[:, None], of_logprobs[:, None])
        return of_logits, None


def _apply(stack: Stack, x: Tensor, linear: FusedLinear) -> Tensor:
    if linear.up is None or linear.down is None:
        return frozen_linear(x, linear.weight, linear.bias)
    if stack.merge and not stack.dropout:
        return functional.linear(x, linear.merged(), linear.bias)
    inner = functional.dropout(x, stack.dropout) if stack.dropout else x
    return frozen_linear(x, linear.weight, linear.bias) + functional.linear(functional.linear(inner, linear.down), linear.up)


def _attend(shape: LlamaShape, layer: FusedLayer, qkv: Tensor, layout: Layout, rotations_N: Tensor) -> Tensor:
    rotated = shape.heads + shape.kv_heads
    heads = qkv.view(-1, rotated + shape.kv_heads, shape.head_dim)
    q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = functional.rms_norm(q, (shape.head_dim,), layer.q_norm, shape.eps)
        k = functional.rms_norm(k, (shape.head_dim,), layer.k_norm, shape.eps)
    qk = torch.view_as_complex(torch.cat([q, k], 1).view(-1, rotated, shape.head_dim // 2, 2))
    q, k = torch.split(torch.view_as_real(qk * rotations_N).flatten(-2), [shape.heads, shape.kv_heads], 1)
    q, k, v = (layout.to_rows(part).transpose(1, 2) for part in (q, k, v))
    if shape.group > 1:
        k, v = k.repeat_interleave(shape.group, 1), v.repeat_interleave(shape.group, 1)
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    return layout.to_tokens(attended.transpose(1, 2)).flatten(1)
