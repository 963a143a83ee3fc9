"""Every decoder gives the logits of the model's own forward, whatever the chunks and however the rows were filled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sandmill.config.manifest import LoraSection
from sandmill.models.decoder import Chunk, decoder_for
from sandmill.models.llama_decoder import LlamaDecoder
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.transformers_decoder import BatchedDecoder, RowDecoder

FUSED = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 20}),
    ("Mistral", {"sliding_window": None}),
]
BATCHED = [("GPT2", {"n_head": 4, "n_layer": 3, "n_embd": 48, "n_positions": 160}), ("GPTNeoX", {}), ("Phi", {})]
ROW = [("Mistral", {"sliding_window": 6})]


def _logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1]


def _extend(decoder, chunks):
    """(A, V): every row's own logits."""
    logits = decoder.extend(chunks)
    return logits.distinct_DV[torch.from_numpy(logits.of_A)]


def _exercise(decoder, model):
    ids = np.random.default_rng(5).integers(0, 100, (3, 40)).tolist()
    a, b, c = ids
    close = {"rtol": 2e-4, "atol": 2e-4}
    got = _extend(decoder, [Chunk(np.array([2]), np.array([a[:8]]), np.array([8]))])
    torch.testing.assert_close(got[0], _logits(model, a[:8]), **close)
    decoder.copy(2, np.array([0, 4]), 8)
    got = _extend(decoder, [Chunk(np.array([0, 2, 3]), np.array([b[:5], a[8:13], c[:5]]), np.array([3, 5, 1]))])
    torch.testing.assert_close(got[0], _logits(model, a[:8] + b[:3]), **close)
    torch.testing.assert_close(got[1], _logits(model, a[:13]), **close)
    torch.testing.assert_close(got[2], _logits(model, c[:1]), **close)
    got = _extend(decoder, [Chunk(np.array([0, 2, 3, 4]), np.array([[7], [8], [9], [10]]), np.ones(4, int))])
    torch.testing.assert_close(got[0], _logits(model, a[:8] + b[:3] + [7]), **close)
    torch.testing.assert_close(got[1], _logits(model, [*a[:13], 8]), **close)
    torch.testing.assert_close(got[2], _logits(model, [*c[:1], 9]), **close)
    torch.testing.assert_close(got[3], _logits(model, [*a[:8], 10]), **close)
    decoder.clear(2)
    got = _extend(decoder, [Chunk(np.array([2]), np.array([c[:30]]), np.array([30]))])
    torch.testing.assert_close(got[0], _logits(model, c[:30]), **close)
    decoder.copy(2, np.array([1]), 30)
    got = _extend(decoder, [Chunk(np.array([1]), np.array([[3]]), np.array([1]))])
    torch.testing.assert_close(got[0], _logits(model, [*c[:30], 3]), **close)
    got = _extend(
        decoder,
        [
            Chunk(np.array([0, 3]), np.array([[4], [5]]), np.ones(2, int)),
            Chunk(np.array([1]), np.array([b[:6]]), np.array([6])),
            Chunk(np.array([4, 2]), np.array([c[:3], c[30:33]]), np.array([1, 3])),
        ],
    )
    torch.testing.assert_close(got[0], _logits(model, a[:8] + b[:3] + [7, 4]), **close)
    torch.testing.assert_close(got[1], _logits(model, [*c[:1], 9, 5]), **close)
    torch.testing.assert_close(got[2], _logits(model, [*c[:30], 3, *b[:6]]), **close)
    torch.testing.assert_close(got[3], _logits(model, [*a[:8], 10, *c[:1]]), **close)
    torch.testing.assert_close(got[4], _logits(model, c[:33]), **close)
    assert decoder.lengths.tolist() == [13, 37, 33, 3, 10]


@pytest.mark.parametrize(("kind", "changes"), FUSED)
def test_fused_decoder_gives_the_models_logits(kind, changes, random_model):
    model = random_model(kind, **changes).model
    decoder = decoder_for(model, rows=5, context_length=64)
    assert isinstance(decoder, LlamaDecoder)
    _exercise(decoder, model)


@pytest.mark.parametrize(("kind", "changes"), BATCHED)
def test_any_other_model_decodes_through_its_own_forward(kind, changes, random_model):
    model = random_model(kind, **changes).model
    decoder = decoder_for(model, rows=5, context_length=64)
    assert isinstance(decoder, BatchedDecoder)
    _exercise(decoder, model)


@pytest.mark.parametrize(("kind", "changes"), ROW)
def test_a_model_that_batches_cannot_reproduce_runs_row_by_row(kind, changes, random_model):
    model = random_model(kind, **changes).model
    decoder = decoder_for(model, rows=5, context_length=64)
    assert isinstance(decoder, RowDecoder)
    _exercise(decoder, model)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "GPTNeoX"])
def test_refresh_takes_up_the_adapter_and_changed_base_weights(kind, random_model):
    loaded = random_model(kind)
    decoder = decoder_for(loaded.model, rows=1, context_length=64)
    targets = ("query_key_value", "dense") if kind == "GPTNeoX" else LoraSection().target_modules
    policy = LoraPolicy(loaded, LoraSection(r=4, target_modules=targets, top_layers=2), seed=0)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_(0, 0.2)
        next(iter(loaded.model.parameters())).mul_(1.1)
    decoder.refresh()
    ids = list(range(5, 25))
    got = _extend(decoder, [Chunk(np.array([0]), np.array([ids]), np.array([20]))])
    torch.testing.assert_close(got[0], _logits(loaded.model, ids), rtol=2e-4, atol=2e-4)
