"""Log-probabilities of sampled tokens in, the scalar to descend and its diagnostics out, in float64.

Nothing is ever multiplied by a mask: what must not count is selected away, because NaN times 0 is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sandmill.config.manifest import ImportanceLevel


class Surrogate(NamedTuple):
    """`loss` is differentiable; the rest are detached, one entry per token of K."""

    loss: torch.Tensor
    clipped_K: torch.Tensor
    """bool: the clipped branch was taken, so the token has no policy gradient."""
    kl_K: torch.Tensor
    """k3 estimate of KL(sampler || trainer)."""


def policy_loss(
    logprobs_K: torch.Tensor,
    entropies_K: torch.Tensor,
    sampled_logprobs_K: torch.Tensor,
    row_K: torch.Tensor,
    advantages_B: torch.Tensor,
    weights_B: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance: ImportanceLevel,
    entropy_bonus: float,
) -> Surrogate:
    """Clipped policy-gradient loss of whole rows: -sum_k weight_k (min(rho_k A_k, clip(rho_k, 1 - low, 1 + high) A_k) + bonus H_k).

    rho is formed from the log-probabilities recorded when the tokens were sampled, never from recomputed ones.
    token     rho_k = exp(logprob_k - sampled_k)                                         PPO, arXiv:1707.06347, equation 7
    sequence  rho_k = exp(mean over the row of (logprob - sampled)), one for all its tokens   GSPO, arXiv:2507.18071, equation 7
    The two clip bounds are DAPO's (arXiv:2503.14476, equation 10). KL is Schulman's k3 (joschu.net/blog/kl-approx.html).

    Where the bound is taken the ratio is selected away before the exponential, so that an overflowing ratio has gradient 0 there and
    not 0 times infinity.
    """
    rows = len(advantages_B)
    log_ratio_K = logprobs_K.double() - sampled_logprobs_K.double()
    advantage_K = advantages_B.double()[row_K]
    weight_K = weights_B.double()[row_K]
    level_K = log_ratio_K
    if importance is ImportanceLevel.SEQUENCE:
        count_B = torch.bincount(row_K, minlength=rows)
        mean_B = torch.zeros(rows, dtype=torch.float64).index_add(0, row_K, log_ratio_K) / count_B
        level_K = mean_B[row_K]
    with torch.no_grad():
        ratio_K = level_K.exp()
        clipped_K = torch.where(advantage_K > 0, ratio_K > 1.0 + clip_high, (advantage_K < 0) & (ratio_K < 1.0 - clip_low))
        bound_K = torch.where(advantage_K > 0, (1.0 + clip_high) * advantage_K, (1.0 - clip_low) * advantage_K)
    free_K = torch.where(clipped_K, torch.zeros_like(level_K), level_K).exp() * advantage_K
    objective_K = torch.where(clipped_K, bound_K, free_K)
    if entropy_bonus:
        objective_K = objective_K + entropy_bonus * entropies_K.double()
    detached_K = log_ratio_K.detach()
    return Surrogate(-(weight_K * objective_K).sum(), clipped_K, detached_K.exp() - 1.0 - detached_K)
