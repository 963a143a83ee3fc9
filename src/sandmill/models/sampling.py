"""Choosing tokens: logits and per-row settings in; token ids and exact log-probabilities out.

Randomness is counter-based: token i of a session uses the uniform number `uniform(seed, i)` and the inverse of the cumulative
distribution, so a row's choice depends on nothing else in the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

_LARGE_VOCABULARY, _BLOCK = 4096, 256
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


def choose(logits_DV: Tensor, of_A: Tensor, temperatures_A: Tensor, top_ps_A: Tensor, uniforms_A: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (A,) int64 and log-probabilities (A,) float64 of the distribution sampled from; row a's logits are `logits_DV[of_A[a]]`.

    Temperature 0 is argmax, with the log-probability under temperature 1. Top-p keeps the smallest set of most likely tokens
    whose mass reaches p (arXiv:1904.09751) and renormalises. float32 logits, float64 `uniforms_A` in [0, 1).
    """
    greedy_A = temperatures_A == 0
    if not bool(((temperatures_A == 1) & (top_ps_A >= 1)).all()):  # rows differ in more than their uniform numbers
        logits_DV = logits_DV[of_A] / torch.where(greedy_A, 1.0, temperatures_A)[:, None]
        of_A = torch.arange(len(of_A))
    scaled_DV = logits_DV - logits_DV.amax(-1, keepdim=True)
    weights_DV = scaled_DV.exp()
    if bool((top_ps_A < 1).any()):
        weights_DV = torch.where(_nucleus(weights_DV, torch.where(greedy_A, 1.0, top_ps_A)), weights_DV, 0.0)
    tokens_A, totals_A = _invert(weights_DV, of_A, uniforms_A)
    if bool(greedy_A.any()):
        tokens_A = torch.where(greedy_A, scaled_DV.argmax(-1), tokens_A)
    return tokens_A, scaled_DV[of_A, tokens_A].double() - totals_A.log()


def _invert(weights_DV: Tensor, of_A: Tensor, uniforms_A: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of the cumulative distribution at `uniforms_A`, and the weights' total."""
    distinct, vocabulary = weights_DV.shape
    if vocabulary < _LARGE_VOCABULARY:
        sums_AV = weights_DV.cumsum(-1, dtype=torch.float64)[of_A]
        return _first_above(sums_AV, uniforms_A * sums_AV[:, -1]), sums_AV[:, -1]
    # First the block of tokens, then the token in it: five times faster than one long running sum.
    blocks_DBk = functional.pad(weights_DV, (0, -vocabulary % _BLOCK)).view(distinct, -1, _BLOCK)
    ends_AB = blocks_DBk.sum(-1, dtype=torch.float64).cumsum(-1)[of_A]
    targets_A = uniforms_A * ends_AB[:, -1]
    block_A = _first_above(ends_AB, targets_A)
    rest_A = targets_A - functional.pad(ends_AB, (1, 0))[torch.arange(len(of_A)), block_A]
    place_A = _first_above(blocks_DBk[of_A, block_A].cumsum(-1, dtype=torch.float64), rest_A)
    return (block_A * _BLOCK + place_A).clamp_max(vocabulary - 1), ends_AB[:, -1]


def _first_above(sums_AK: Tensor, targets_A: Tensor) -> Tensor:
    """The first place where the running sum exceeds the target, at the latest the last one with mass: u * total may round up to total
    itself, and a sum of parts may end a rounding below the whole. Never past the end, also for weights that are no numbers: their
    log-probability then says so, instead of an index error."""
    totals_A = sums_AK[:, -1]
    inside_A = torch.minimum(targets_A, torch.nextafter(totals_A, torch.zeros_like(totals_A)))
    return torch.searchsorted(sums_AK, inside_A[:, None], right=True)[:, 0].clamp_max(sums_AK.shape[1] - 1)


def _nucleus(weights_AV: Tensor, top_ps_A: Tensor) -> Tensor:
    """bool (A, V): the tokens kept. The most likely one always is; equal weights are taken in id order."""
    ordered_AV, order_AV = weights_AV.sort(dim=-1, descending=True, stable=True)
    before_AV = ordered_AV.cumsum(-1, dtype=torch.float64) - ordered_AV.double()
    kept_AV = (before_AV < top_ps_A.double()[:, None] * ordered_AV.sum(-1, dtype=torch.float64, keepdim=True)) | (top_ps_A >= 1)[:, None]
    return torch.zeros_like(kept_AV).scatter(1, order_AV, kept_AV)
