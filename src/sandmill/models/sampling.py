"""Choosing tokens: logits and per-row settings in; token ids and exact log-probabilities out.

Randomness is counter-based: token i of a session uses the uniform number `uniform(seed, i)` and the inverse of the cumulative
distribution, so a row's choice depends on nothing else in the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform doubles in [0, 1) by splitmix64 (Steele, Lea, Flood 2014) of the `counters`-th step from a mixed seed."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds) + (counters + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def choose(logits_AV: Tensor, temperatures_A: Tensor, top_ps_A: Tensor, uniforms_A: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (A,) int64 and log-probabilities (A,) float64 of the distribution sampled from.

    Temperature 0 is argmax, with the log-probability under temperature 1. Top-p keeps the smallest set of most likely tokens
    whose mass reaches p (arXiv:1904.09751) and renormalises. float32 logits, float64 `uniforms_A` in [0, 1).
    """
    greedy_A = temperatures_A == 0
    plain = bool((temperatures_A == 1).all())
    scaled_AV = logits_AV if plain else logits_AV / torch.where(greedy_A, 1.0, temperatures_A)[:, None]
    scaled_AV = scaled_AV - scaled_AV.amax(-1, keepdim=True)
    weights_AV = scaled_AV.exp()
    if bool((top_ps_A < 1).any()):
        weights_AV = torch.where(_nucleus(weights_AV, torch.where(greedy_A, 1.0, top_ps_A)), weights_AV, 0.0)
    cumulative_AV = weights_AV.cumsum(-1, dtype=torch.float64)
    totals_A = cumulative_AV[:, -1]
    # u * total may round up to total itself, past the last token with mass; the largest double below total is still inside it.
    targets_A = torch.minimum(uniforms_A * totals_A, torch.nextafter(totals_A, torch.zeros_like(totals_A)))
    # Clamped for weights that are no numbers: their log-probability then says so, instead of an index error.
    tokens_A = torch.searchsorted(cumulative_AV, targets_A[:, None], right=True)[:, 0].clamp_max(logits_AV.shape[1] - 1)
    if bool(greedy_A.any()):
        tokens_A = torch.where(greedy_A, scaled_AV.argmax(-1), tokens_A)
    return tokens_A, scaled_AV.gather(1, tokens_A[:, None])[:, 0].double() - totals_A.log()


def _nucleus(weights_AV: Tensor, top_ps_A: Tensor) -> Tensor:
    """bool (A, V): the tokens kept. The most likely one always is; equal weights are taken in id order."""
    ordered_AV, order_AV = weights_AV.sort(dim=-1, descending=True, stable=True)
    before_AV = ordered_AV.cumsum(-1, dtype=torch.float64) - ordered_AV.double()
    kept_AV = (before_AV < top_ps_A.double()[:, None] * ordered_AV.sum(-1, dtype=torch.float64, keepdim=True)) | (top_ps_A >= 1)[:, None]
    return torch.zeros_like(kept_AV).scatter(1, order_AV, kept_AV)
