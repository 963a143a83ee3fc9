"""Choosing tokens: the inverse of the cumulative distribution, exactly, for vocabularies small and large."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sandmill.models.sampling import choose

VOCABULARIES = [7, 704, 4096, 4100, 49152]


def _choose(logits, uniforms, *, temperature=1.0, top_p=1.0):
    rows = len(logits)
    tokens, logprobs = choose(
        logits,
        torch.arange(rows),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.as_tensor(uniforms, dtype=torch.float64),
    )
    return tokens.numpy(), logprobs.numpy()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("top_p", [1.0, 0.4])
def test_it_inverts_the_cumulative_distribution(vocabulary, top_p):
    torch.manual_seed(vocabulary)
    logits, uniforms = torch.randn(64, vocabulary) * 3, np.random.default_rng(1).random(64)
    tokens, logprobs = _choose(logits, uniforms, top_p=top_p)
    for row, token, logprob, uniform in zip(logits.double().numpy(), tokens, logprobs, uniforms, strict=True):
        p = np.exp(row - row.max())
        p /= p.sum()
        if top_p < 1:
            order = np.argsort(-p, kind="stable")
            dropped = order[np.cumsum(p[order]) - p[order] >= top_p]
            p[dropped] = 0
            p /= p.sum()
        assert p[token] > 0
        assert np.isclose(logprob, np.log(p[token]), atol=1e-5)
        assert p[:token].sum() - 1e-6 <= uniform <= p[: token + 1].sum() + 1e-6


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_are_tokens_with_mass(vocabulary, uniform):
    logits = torch.full((16, vocabulary), float("-inf"))
    with_mass = torch.arange(16) % (vocabulary - 2) + 1
    logits[torch.arange(16), with_mass] = 1.0
    tokens, logprobs = _choose(logits, [uniform] * 16)
    assert tokens.tolist() == with_mass.tolist()
    assert logprobs.tolist() == [0.0] * 16


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_row_is_chosen_alike_in_any_batch(vocabulary):
    torch.manual_seed(2)
    logits, uniforms = torch.randn(96, vocabulary), np.random.default_rng(3).random(96)
    tokens, logprobs = _choose(logits, uniforms)
    for start in range(0, 96, 16):
        part = _choose(logits[start : start + 16].clone(), uniforms[start : start + 16])
        assert part[0].tolist() == tokens[start : start + 16].tolist()
        assert part[1].tolist() == logprobs[start : start + 16].tolist()


def test_what_is_no_number_is_reported_and_not_an_index_error():
    logits = torch.full((16, 5000), float("nan"))
    assert np.isnan(_choose(logits, [0.5] * 16)[1]).all()
