"""The loss against autograd through the textbook expression, and where infinities must not leak."""

from __future__ import annotations

import math

import pytest
import torch

from sandmill.config.manifest import ImportanceLevel
from sandmill.training.losses import policy_loss


def loss_of(logprobs, advantages, rows=None, sampled=None, importance=ImportanceLevel.TOKEN):
    count = len(logprobs)
    return policy_loss(
        logprobs,
        torch.zeros(count),
        torch.zeros(count) if sampled is None else sampled,
        torch.arange(count) if rows is None else rows,
        torch.tensor(advantages),
        torch.ones(len(advantages)),
        clip_low=0.2,
        clip_high=0.28,
        importance=importance,
        entropy_bonus=0.0,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.5, 1.0, True),
        (1.5, -1.0, False),
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (1.0, 1.0, False),
        (1.25, 1.0, False),
        (0.85, -1.0, False),
    ],
)
def test_clipping_takes_the_pessimistic_branch(ratio, advantage, clipped):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    surrogate = loss_of(logprobs, [advantage])
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert surrogate.loss.item() == pytest.approx(expected, rel=1e-6)
    assert bool(surrogate.clipped_K[0]) is clipped
    surrogate.loss.backward()
    assert float(logprobs.grad) == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-6)


def test_an_overflowing_ratio_in_the_clipped_branch_has_gradient_zero_not_nan():
    logprobs = torch.tensor([0.0, -0.1], dtype=torch.float64, requires_grad=True)
    surrogate = loss_of(logprobs, [1.0, 1.0], sampled=torch.tensor([-1000.0, -0.1], dtype=torch.float64))
    surrogate.loss.backward()
    assert surrogate.loss.item() == pytest.approx(-2.28)
    assert logprobs.grad.tolist() == [0.0, -1.0]


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens():
    logprobs = torch.tensor([0.3, -0.1, 0.1, 2.0], dtype=torch.float64, requires_grad=True)
    surrogate = loss_of(logprobs, [1.0, -2.0], rows=torch.tensor([0, 0, 0, 1]), importance=ImportanceLevel.SEQUENCE)
    assert surrogate.loss.item() == pytest.approx(-3 * math.exp(0.1) + 2 * math.exp(2.0))
    assert not surrogate.clipped_K.any()


def test_kl_is_never_negative_and_zero_on_policy():
    same = torch.tensor([-1.0, -2.0])
    assert loss_of(same, [1.0, 1.0], sampled=same).kl_K.tolist() == [0.0, 0.0]
    assert (loss_of(torch.randn(50), [1.0] * 50, sampled=torch.randn(50)).kl_K >= 0).all()
