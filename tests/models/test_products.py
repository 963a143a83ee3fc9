"""Products with laid-out matrices: right, the same bits in every batch, differentiable, and never stale."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional

from sandmill.models import products
from sandmill.models.llama import FusedLinear
from sandmill.models.products import frozen_linear, product

SHAPES = [(64, 128), (576, 960), (1536, 576), (576, 2000)]


def _linear(columns, rows, *, adapted, bias):
    torch.manual_seed(columns + rows)
    up, down = (torch.randn(rows, 4) / 4, torch.randn(4, columns) / 4) if adapted else (None, None)
    return FusedLinear(torch.randn(rows, columns), torch.randn(rows) if bias else None, up, down)


@pytest.mark.parametrize(("columns", "rows"), SHAPES)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_product_and_the_same_in_any_batch(columns, rows, adapted, bias):
    linear = _linear(columns, rows, adapted=adapted, bias=bias)
    x, z = torch.randn(160, columns), torch.randn(160, rows)
    ready = product(linear)
    y = ready(x)
    exact = x.double() @ linear.merged().double().t() + (0 if linear.bias is None else linear.bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=5e-4)
    torch.testing.assert_close(ready.added_to(z.clone(), x).double(), exact + z.double(), rtol=1e-5, atol=5e-4)
    for start, end in ((0, 16), (16, 64), (48, 160), (144, 160), (0, ready.row_multiple), (16, 16 + 3 * ready.row_multiple)):
        assert torch.equal(ready(x[start:end].clone()), y[start:end])
        assert torch.equal(ready.added_to(z[start:end].clone(), x[start:end].clone()), ready.added_to(z.clone(), x)[start:end])


@pytest.mark.parametrize(("columns", "rows"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_plain_product(columns, rows, bias):
    linear = _linear(columns, rows, adapted=False, bias=bias)
    x, g = torch.randn(37, columns, requires_grad=True), torch.randn(37, rows)
    [got] = torch.autograd.grad(frozen_linear(x, linear.weight, linear.bias), x, g)
    [plain] = torch.autograd.grad(functional.linear(x, linear.weight, linear.bias), x, g)
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=2e-4)


def test_a_matrix_that_is_trained_gets_its_gradient():
    weight = torch.randn(960, 576, requires_grad=True)
    frozen_linear(torch.ones(16, 576), weight, None).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((960, 576), 16.0))


def test_a_matrix_written_in_place_is_laid_out_anew():
    weight, x = torch.randn(960, 576), torch.randn(16, 576)
    before = frozen_linear(x, weight, None)
    weight.mul_(2)
    torch.testing.assert_close(frozen_linear(x, weight, None), 2 * before, rtol=1e-5, atol=5e-4)
    torch.testing.assert_close(product(FusedLinear(weight, None, None, None))(x), 2 * before, rtol=1e-5, atol=5e-4)


def test_layouts_die_with_their_matrix():
    gc.collect()
    known = len(products._forward_layouts)
    weight = torch.randn(960, 576)
    x = torch.randn(16, 576, requires_grad=True)
    frozen_linear(x, weight, None).sum().backward()
    assert len(products._forward_layouts) == known + products._worth_laying_out(weight)
    watch = weakref.ref(weight)
    del weight, x
    gc.collect()
    assert watch() is None
    assert len(products._forward_layouts) == known
