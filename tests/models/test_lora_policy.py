"""The policy's log-probabilities are those of plain transformers + peft, in every layout, and of the sampler; its files are peft's."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch.nn import functional

from sandmill.config.manifest import LoraSection
from sandmill.errors import CheckpointCorrupt, ConfigError
from sandmill.models import llama_forward
from sandmill.models.engines.torch import TorchEngine
from sandmill.models.loading import save_folder
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.model import Sampling

LENGTHS = (12, 7, 20, 2)
KINDS = [("Llama", {}), ("Llama", {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1}), ("Qwen2", {}), ("Qwen3", {})]


def _randomised(policy: LoraPolicy, seed: int = 1) -> LoraPolicy:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def _rows():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, 90, (len(LENGTHS), max(LENGTHS)), generator=generator)
    lengths = torch.tensor(LENGTHS)
    inside = torch.arange(max(LENGTHS)) < lengths[:, None]
    select = (torch.rand(ids.shape, generator=generator) < 0.5) & inside
    select[:, 0] = False
    return ids, lengths, select, inside


def _reference(policy, ids, lengths, select, temperature):
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    logits = policy._peft(input_ids=ids, attention_mask=mask).logits / temperature
    logprobs = functional.log_softmax(logits[:, :-1], -1)
    picked = logprobs.gather(2, ids[:, 1:, None])[..., 0][select[:, 1:]]
    entropy = -(logprobs.exp() * logprobs).sum(-1)[select[:, 1:]]
    return picked, entropy


def _gradients(policy, scored):
    for parameter in policy.trainable().values():
        parameter.grad = None
    weights = torch.linspace(-1, 1, len(scored[0]))
    ((scored[0] * weights).sum() + 0.3 * scored[1].sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in policy.trainable().items()}


def _close(got, wanted, tolerance=1e-4):
    assert got.keys() == wanted.keys()
    for name in got:
        error = (got[name] - wanted[name]).abs().max()
        assert error <= tolerance * max(1.0, float(wanted[name].abs().max())), f"{name}: {error}"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_scores_and_gradients_are_those_of_plain_peft(kind, changes, temperature, random_model):
    policy = _randomised(LoraPolicy(random_model(kind, **changes), LoraSection(r=4, top_layers=2), seed=0))
    policy._peft.double()  # what rounding is left is that of float32 norms and rotations inside transformers
    ids, lengths, select, _ = _rows()
    wanted = _reference(policy, ids, lengths, select, temperature)
    wanted_gradients = _gradients(policy, wanted)
    got = policy.score(ids, lengths, select, temperature)
    torch.testing.assert_close(got.logprobs_K, wanted[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(got.entropies_K, wanted[1], rtol=0, atol=2e-5)
    _close(_gradients(policy, got), wanted_gradients, 5e-5)


@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX"])
def test_packed_and_padded_layouts_agree(kind, random_model):
    targets = ("query_key_value", "dense") if kind == "GPTNeoX" else LoraSection().target_modules
    policy = _randomised(LoraPolicy(random_model(kind), LoraSection(r=4, target_modules=targets), seed=0))
    ids, lengths, select, inside = _rows()
    starts = tuple(int(start) for start in torch.cumsum(lengths, 0) - lengths)
    padded = policy.score(ids, lengths, select, 1.0)
    padded_gradients = _gradients(policy, padded)
    packed = policy.score_packed(ids[inside], starts, select[inside], 1.0)
    torch.testing.assert_close(packed.logprobs_K, padded.logprobs_K, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed.entropies_K, padded.entropies_K, rtol=0, atol=1e-5)
    _close(_gradients(policy, packed), padded_gradients)


def test_what_stands_after_a_rows_end_changes_nothing(random_model):
    policy = _randomised(LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=0))
    ids, lengths, select, inside = _rows()
    before = policy.score(ids, lengths, select, 1.0)
    after = policy.score(torch.where(inside, ids, 77), lengths, select, 1.0)
    assert torch.equal(before.logprobs_K, after.logprobs_K)


def test_a_large_head_is_computed_in_chunks_with_the_same_result(random_model, monkeypatch):
    policy = _randomised(LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=0))
    ids, lengths, select, _ = _rows()
    whole = policy.score(ids, lengths, select, 0.9)
    whole_gradients = _gradients(policy, whole)
    monkeypatch.setattr(llama_forward, "_HEAD_CHUNK", 300)
    chunked = policy.score(ids, lengths, select, 0.9)
    torch.testing.assert_close(chunked.logprobs_K, whole.logprobs_K, rtol=0, atol=1e-6)
    _close(_gradients(policy, chunked), whole_gradients)


@pytest.mark.parametrize("bad", ["first", "past"])
def test_a_position_without_a_log_probability_is_refused(bad, random_model):
    policy = LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=0)
    ids, lengths, select, inside = _rows()
    select[1, 0 if bad == "first" else 8] = True
    with pytest.raises(ValueError, match="position"):
        policy.score(ids, lengths, select, 1.0)
    select[1, 0] = True
    with pytest.raises(ValueError, match="nothing comes before"):
        policy.score_packed(ids[inside], (0, 12, 19, 39), select[inside], 1.0)


@pytest.mark.parametrize(("kind", "temperature"), [("tiny", 1.0), ("tiny", 0.6), ("Llama", 1.0), ("Qwen3", 1.3), ("GPTNeoX", 1.0)])
def test_sampler_and_trainer_agree(kind, temperature, tiny, random_model):
    loaded = tiny if kind == "tiny" else random_model(kind)
    targets = ("query_key_value", "dense") if kind == "GPTNeoX" else LoraSection().target_modules
    policy = LoraPolicy(loaded, LoraSection(r=4, target_modules=targets), seed=0)

    async def play(engine, seed):
        session = await engine.session(seed=seed)
        ids, selected, logprobs = [], [], []
        for context in ([5 + seed % 7, 9, 11], [20, 21], [30]):
            sample = await session.sample(context, Sampling(max_new_tokens=8, stop_ids=frozenset({3}), temperature=temperature))
            ids += [*context, *sample.token_ids]
            selected += [False] * len(context) + [True] * len(sample.token_ids)
            logprobs += sample.logprobs
        await session.close()
        return ids, selected, logprobs

    async def run():
        engine = TorchEngine(loaded, rows=6, context_length=64)
        _randomised(policy)
        engine.publish(1)
        episodes = await asyncio.gather(*(play(engine, seed) for seed in range(24)))
        await engine.close()
        return episodes

    for ids, selected, logprobs in asyncio.run(run()):
        scored = policy.score(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([selected]), temperature)
        torch.testing.assert_close(scored.logprobs_K, torch.tensor(logprobs), rtol=0, atol=1e-4)


def test_the_adapter_loads_in_plain_transformers_and_peft(tmp_path, tiny):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_folder(tiny, tmp_path / "base")
    policy = _randomised(LoraPolicy(tiny, LoraSection(), seed=0))
    policy.save_adapter(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    ids, lengths, select, inside = _rows()
    with torch.no_grad():
        logprobs = functional.log_softmax(plain(input_ids=ids, attention_mask=inside.long()).logits[:, :-1], -1)
    wanted = logprobs.gather(2, ids[:, 1:, None])[..., 0][select[:, 1:]]
    torch.testing.assert_close(policy.score(ids, lengths, select, 1.0).logprobs_K.detach(), wanted, rtol=0, atol=1e-4)


def test_a_saved_adapter_is_restored_bit_for_bit(tmp_path, random_model):
    policy = _randomised(LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=0))
    policy.save_adapter(tmp_path)
    other = LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=9)
    other.load_adapter(tmp_path)
    for mine, theirs in zip(policy.trainable().items(), other.trainable().items(), strict=True):
        assert mine[0] == theirs[0]
        assert torch.equal(mine[1], theirs[1])


def test_a_damaged_or_foreign_adapter_is_named(tmp_path, random_model):
    policy = LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=0)
    policy.save_adapter(tmp_path)
    with pytest.raises(CheckpointCorrupt, match="does not fit"):
        LoraPolicy(random_model("Llama"), LoraSection(r=8), seed=0).load_adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        policy.load_adapter(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        policy.load_adapter(tmp_path)


def test_a_fresh_adapter_changes_nothing_and_is_drawn_by_its_seed(random_model):
    loaded = random_model("Llama")
    ids, lengths, select, inside = _rows()
    with torch.no_grad():
        logprobs = functional.log_softmax(loaded.model(input_ids=ids, attention_mask=inside.long()).logits[:, :-1], -1)
    wanted = logprobs.gather(2, ids[:, 1:, None])[..., 0][select[:, 1:]]
    policy = LoraPolicy(loaded, LoraSection(r=4), seed=5)
    torch.testing.assert_close(policy.score(ids, lengths, select, 1.0).logprobs_K.detach(), wanted, rtol=0, atol=1e-4)
    again = LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=5)
    other = LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=6)
    pairs = list(zip(policy.trainable().values(), again.trainable().values(), other.trainable().values(), strict=True))
    assert all(torch.equal(mine, same) for mine, same, _ in pairs)
    assert any(not torch.equal(mine, different) for mine, _, different in pairs)


def test_wrong_settings_are_named(random_model):
    with pytest.raises(ConfigError, match="topLayers"):
        LoraPolicy(random_model("Llama"), LoraSection(top_layers=4), seed=0)
    with pytest.raises(ConfigError, match="no module 'no_such'"):
        LoraPolicy(random_model("Llama"), LoraSection(target_modules=("no_such",)), seed=0)


def test_dropout_applies_in_training_only(random_model):
    policy = _randomised(LoraPolicy(random_model("Llama"), LoraSection(r=4, dropout=0.5), seed=0))
    ids, lengths, select, _ = _rows()
    torch.manual_seed(1)
    first, second = (policy.score(ids, lengths, select, 1.0).logprobs_K for _ in range(2))
    assert not torch.equal(first, second)
    policy.train(False)
    wanted, _ = _reference(policy, ids, lengths, select, 1.0)
    torch.testing.assert_close(policy.score(ids, lengths, select, 1.0).logprobs_K, wanted, rtol=0, atol=1e-4)
