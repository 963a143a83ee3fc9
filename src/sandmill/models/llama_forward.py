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
        """(N, D) -> (B, T, D). A token that lies in several rows gets the sum of their gradients, always in the same order: that of
        `embedding` is added up by row of the matrix, where plain indexing lets threads race."""
        return x.view(self.rows, self.columns, -1) if self.slots is None else functional.embedding(self.slots, x)

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
    turned = stack.rotations_TP[layout.positions].unsqueeze(1).expand(-1, shape.heads + shape.kv_heads, -1)
    rotations_N = functional.pad(turned, (0, 0, 0, shape.kv_heads), value=1.0)
    for layer in stack.layers[first:end]:
        qkv = _apply(stack, _norm(x, shape.eps), layer.qkv)
        x = x + _apply(stack, _attend(shape, layer, qkv, layout, rotations_N), layer.out)
        x = x + _apply(stack, _gated(_apply(stack, _norm(x, shape.eps), layer.gate_up)), layer.down)
    return x


def score_hidden(stack: Stack, hidden_CD: Tensor, of_K: Tensor, targets_K: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy (nats, float32) of softmax(logits / temperature) after the final norm and head, for each target k of the
    context `of_K[k]`."""
    size = max(1, _HEAD_CHUNK // stack.shape.vocabulary)
    if len(hidden_CD) <= size:
        return _score(stack, hidden_CD, of_K, targets_K, temperature)
    parts = []
    for start, hidden in zip(range(0, len(hidden_CD), size), torch.split(hidden_CD, size), strict=True):
        chosen = ((of_K >= start) & (of_K < start + size)).nonzero()[:, 0]
        scored = checkpoint(_score, stack, hidden, of_K[chosen] - start, targets_K[chosen], temperature, use_reentrant=False)
        parts.append((chosen, *scored))
    chosen, logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    order = chosen.argsort()
    return logprobs[order], entropies[order]


def _score(stack: Stack, hidden: Tensor, of: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = frozen_linear(functional.rms_norm(hidden, (hidden.shape[-1],), stack.norm, stack.shape.eps), stack.head, None)
    scored: tuple[Tensor, Tensor] = _Distribution.apply(logits if temperature == 1.0 else logits / temperature, of, targets)  # type: ignore[no-untyped-call]
    return scored


class _Distribution(torch.autograd.Function):
    """log p(target) and entropy H of softmax(z), for targets of the rows `of` of logits z (C, V). With p = softmax(z):
    d log p_t / dz = onehot(t) - p and dH / dz = -p (log p + H). The backward pass needs one C x V matrix, where autograd keeps three."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, of: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = functional.log_softmax(logits, -1)
        entropies = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        ctx.save_for_backward(logprobs, entropies, of, targets)
        ctx.set_materialize_grads(False)
        return logprobs[of, targets], entropies[of]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        logprobs, entropies, of, targets = ctx.saved_tensors
        of_logprobs, of_entropies = gradients
        if of_logprobs is None and of_entropies is None:
            return None, None, None
        of_logits = logprobs.exp()
        if of_entropies is not None:
            total = torch.zeros_like(entropies).index_add_(0, of, of_entropies)
            factors = (logprobs + entropies[:, None]).mul_(-total[:, None])
            if of_logprobs is not None:
                factors.sub_(torch.zeros_like(entropies).index_add_(0, of, of_logprobs)[:, None])
            of_logits.mul_(factors)
        elif of_logprobs is not None:
            of_logits.mul_(-torch.zeros_like(entropies).index_add_(0, of, of_logprobs)[:, None])
        if of_logprobs is not None:
            of_logits.view(-1).index_add_(0, of * logprobs.shape[1] + targets, of_logprobs)
        return of_logits, None, None


class _Norm(torch.autograd.Function):
    """y = x / rms(x), rms with `eps` under the root; dx = (dy - y mean(dy y)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        y: Tensor = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        mean = torch.linalg.vecdot(gradients[0], y).div_(y.shape[-1])[..., None]
        return torch.addcmul(gradients[0], y, mean, value=-1).mul_(scale), None


class _Gated(torch.autograd.Function):
    """silu(gate) * up of z = (gate, up); keeps z alone, and fills one gradient instead of joining two."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        gate, up = z.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        gate, up = z.chunk(2, -1)
        of_z = torch.empty_like(z)
        of_gate, of_up = of_z.chunk(2, -1)
        torch.mul(gradients[0], functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=of_gate)
        return of_z


def _norm(x: Tensor, eps: float) -> Tensor:
    y: Tensor = _Norm.apply(x, eps)  # type: ignore[no-untyped-call]
    return y


def _gated(z: Tensor) -> Tensor:
    y: Tensor = _Gated.apply(z)  # type: ignore[no-untyped-call]
    return y


def _apply(stack: Stack, x: Tensor, linear: FusedLinear) -> Tensor:
    if linear.up is None or linear.down is None:
        return frozen_linear(x, linear.weight, linear.bias)
    if stack.merge and not stack.dropout:
        return functional.linear(x, linear.merged(), linear.bias)
    inner = functional.dropout(x, stack.dropout) if stack.dropout else x
    return frozen_linear(x, linear.weight, linear.bias) + functional.linear(functional.linear(inner, linear.down), linear.up)


def _attend(shape: LlamaShape, layer: FusedLayer, qkv: Tensor, layout: Layout, rotations_N: Tensor) -> Tensor:
    """`rotations_N` (N, heads and key and value heads, D / 2): 1 for the values."""
    parts = [shape.heads, shape.kv_heads, shape.kv_heads]
    heads = qkv.view(-1, sum(parts), shape.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k, v = torch.split(heads, parts, 1)
        q = functional.rms_norm(q, (shape.head_dim,), layer.q_norm, shape.eps)
        k = functional.rms_norm(k, (shape.head_dim,), layer.k_norm, shape.eps)
        heads = torch.cat([q, k, v], 1)
    turned = torch.view_as_real(torch.view_as_complex(heads.view(*rotations_N.shape, 2)) * rotations_N)
    rows = layout.to_rows(turned.flatten(1)).view(layout.rows, layout.columns, sum(parts), shape.head_dim)
    q, k, v = torch.split(rows.transpose(1, 2), parts, 1)
    if shape.group > 1:
        k, v = k.repeat_interleave(shape.group, 1), v.repeat_interleave(shape.group, 1)
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    return layout.to_tokens(attended.transpose(1, 2)).flatten(1)
