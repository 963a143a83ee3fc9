"""Matrix products of the decoder: a fused matrix in; y = x W^T + b, and z + y, out, for numbers of rows that are a multiple of its own.

A row's bits do not depend on the other rows. Large matrices are laid out once for oneDNN's kernels (1.5 to 2.8 times as fast as handing
MKL the plain matrix, which it lays out anew in every call; `bench/products.py`), where this build of torch
has them and they keep that promise; others are plain.
"""

from __future__ import annotations

import functools
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from sandmill.models.decoder import ROW_MULTIPLE
from sandmill.models.llama import FusedLinear

_LARGE: Final = 1 << 17
"""Elements from which laying out pays; below it a call's fixed cost counts more."""
_USUAL_ROWS: Final = 64


class Product(Protocol):
    """One matrix, ready to be multiplied by."""

    @property
    def row_multiple(self) -> int:
        """x must have a multiple of so many rows, or its bits may depend on their number."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """(N, in) -> (N, out)."""
        ...

    def added_to(self, z: Tensor, x: Tensor) -> Tensor:
        """z (N, out) plus the product with x (N, in); may not change z."""
        ...


def product(linear: FusedLinear) -> Product:
    """The product with `linear`'s effective matrix as it is now. A matrix without an adapter is laid out once for all its users."""
    weight = linear.merged().detach()
    if not _worth_laying_out(weight):
        return _Plain(weight, linear.bias)
    return _LaidOut(_lay_out(weight) if linear.up is not None else _laid_out(linear.weight), linear.bias)


class _Plain:
    row_multiple = ROW_MULTIPLE

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def added_to(self, z: Tensor, x: Tensor) -> Tensor:
        added = torch.addmm(z, x, self._weight.t())
        return added if self._bias is None else added.add_(self._bias)


class _LaidOut:
    row_multiple = 4
    """A single row takes another kernel; from 4 to 16 rows the matrix is read in the same time."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return _multiply(x, self._weight, self._bias)

    def added_to(self, z: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(z)


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear` for training on top of a frozen matrix: (..., in) -> (..., out), differentiable in `x` alone.

    `weight` must be the same tensor object in every call, or it is laid out anew each time.
    """
    if weight.requires_grad or not _worth_laying_out(weight):
        return functional.linear(x, weight, bias)
    y: Tensor = _Frozen.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return _multiply(x, _laid_out(weight), None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _multiply(gradients[0].contiguous(), _laid_out(ctx.weight, transposed=True), None), None


def _multiply(x: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")
    return y


def _lay_out(weight: Tensor) -> Tensor:
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _USUAL_ROWS)
    return laid_out


_forward_layouts: Any = WeakIdKeyDictionary()
_backward_layouts: Any = WeakIdKeyDictionary()


def _laid_out(weight: Tensor, *, transposed: bool = False) -> Tensor:
    """A frozen matrix laid out, kept as long as the matrix lives unchanged."""
    known = _backward_layouts if transposed else _forward_layouts
    version, laid_out = known.get(weight, (None, None))
    if version != weight._version:
        laid_out = _lay_out(weight.t() if transposed else weight)
        known[weight] = weight._version, laid_out
    result: Tensor = laid_out
    return result


def _worth_laying_out(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.numel() >= _LARGE and _can_lay_out()


@functools.cache
def _can_lay_out() -> bool:
    """Tried, because these operators are not torch's public ones: they must agree with the plain product and give a row the same bits in
    every batch."""
    try:
        with torch.inference_mode():
            weight = torch.linspace(-1, 1, 576 * 240).view(240, 576).sin()
            x = torch.linspace(-3, 3, 96 * 576).view(96, 576).cos()
            laid_out = _LaidOut(_lay_out(weight), None)
            all_rows = laid_out(x)
            parts = torch.cat([laid_out(part.contiguous()) for part in torch.split(x, [4, 8, 32, 52])])
            return torch.equal(all_rows, parts) and torch.allclose(all_rows, x @ weight.t(), rtol=1e-4, atol=1e-3)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
