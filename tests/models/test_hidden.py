"""States that the engine computed below the adapter stand in for the trainer's own: the same log-probabilities and gradients."""

from __future__ import annotations

import asyncio

import pytest
import torch

from sandmill.config.manifest import LoraSection
from sandmill.models import lora_policy
from sandmill.models.engines.torch import TorchEngine
from sandmill.models.hidden import HiddenStates
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.model import Sampling


def _episodes(loaded, policy):
    async def one(engine, seed):
        session = await engine.session(seed=seed)
        ids, selected = [], []
        for context in ([5, 9, 11 + seed // 4], [20, 21], [30]):
            sample = await session.sample(context, Sampling(max_new_tokens=5, stop_ids=frozenset({3})))
            ids += [*context, *sample.token_ids]
            selected += [False] * len(context) + [True] * len(sample.token_ids)
        await session.close()
        return ids, selected

    async def main():
        engine = TorchEngine(loaded, rows=5, context_length=64, hidden=policy.hidden_states)
        episodes = await asyncio.gather(*(one(engine, seed) for seed in range(8)))
        return engine, episodes

    return asyncio.run(main())


def _packed(episodes):
    ids = torch.tensor([token for row, _ in episodes for token in row])
    select = torch.tensor([flag for _, row in episodes for flag in row])
    lengths = torch.tensor([len(row) for row, _ in episodes])
    return ids, tuple((lengths.cumsum(0) - lengths).tolist()), select, lengths


def _padded(episodes, lengths):
    columns = int(lengths.max())
    ids = torch.tensor([row + [7] * (columns - len(row)) for row, _ in episodes])
    select = torch.tensor([row + [False] * (columns - len(row)) for _, row in episodes])
    return ids, lengths, select


def _tree(episodes, lengths):
    """Siblings (four in a row) share the three tokens of their prompt."""
    columns = int(lengths.max())
    ids, select, paths = [], [], []
    for number, (row, flags) in enumerate(episodes):
        shared = paths[number - 1][:3] if number % 4 else []
        path = [*shared, *range(len(ids), len(ids) + len(row) - len(shared))]
        ids += row[len(shared) :]
        select.append(flags + [False] * (columns - len(row)))
        paths.append([*path, *[path[-1]] * (columns - len(path))])
    return torch.tensor(ids), torch.tensor(paths), lengths, torch.tensor(select)


def _gradients(policy, scored):
    for parameter in policy.trainable().values():
        parameter.grad = None
    (scored.logprobs_K * torch.linspace(-1, 1, len(scored.logprobs_K))).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.trainable().items()}


@pytest.fixture
def counted(monkeypatch):
    """Counts the layers that the trainer runs."""
    layers = []

    def run(stack, x, layout, first, end):
        layers.append(end - first)
        return real(stack, x, layout, first, end)

    real = lora_policy.run_layers
    monkeypatch.setattr(lora_policy, "run_layers", run)
    return layers


@pytest.mark.parametrize("layout", ["packed", "padded", "tree"])
def test_kept_states_give_the_same_scores_and_gradients_without_the_lower_layers(layout, random_model, counted):
    loaded = random_model("Llama")
    policy = LoraPolicy(loaded, LoraSection(r=4, top_layers=1), seed=0)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_(0, 0.2)
    engine, episodes = _episodes(loaded, policy)
    ids, starts, select, lengths = _packed(episodes)

    def score():
        counted.clear()
        if layout == "packed":
            return policy.score_packed(ids, starts, select, 1.0)
        return policy.score(*_padded(episodes, lengths), 1.0) if layout == "padded" else policy.score_tree(*_tree(episodes, lengths), 1.0)

    kept = score()
    assert sum(counted) == 1
    kept_gradients = _gradients(policy, kept)
    engine.publish(1)
    computed = score()
    assert sum(counted) == 3
    torch.testing.assert_close(kept.logprobs_K, computed.logprobs_K, rtol=0, atol=2e-5)
    torch.testing.assert_close(kept.entropies_K, computed.entropies_K, rtol=0, atol=2e-5)
    for name, gradient in _gradients(policy, computed).items():
        assert (gradient - kept_gradients[name]).abs().max() <= 1e-4 * max(1.0, float(gradient.abs().max()))
    asyncio.run(engine.close())


def test_states_replace_those_of_the_reply_before_unless_another_session_ended_there():
    hidden = HiddenStates(1)
    one, two, three = (torch.full((1, 1), float(number)) for number in range(3))
    for _ in range(2):
        hidden.keep((1, 2), one, instead_of=None)
    hidden.keep((1, 2, 3), two, instead_of=(1, 2))
    assert hidden.find([1, 2]) is one
    hidden.keep((1, 2, 4), three, instead_of=(1, 2))
    assert hidden.find([1, 2]) is None
    assert hidden.find([1, 2, 3]) is two
    assert hidden.find([1, 2, 4]) is three
    hidden.clear()
    assert hidden.find([1, 2, 4]) is None


def test_a_row_the_engine_never_saw_is_computed(random_model, counted):
    loaded = random_model("Llama")
    policy = LoraPolicy(loaded, LoraSection(r=4, top_layers=1), seed=0)
    engine, episodes = _episodes(loaded, policy)
    episodes[3][0][0] = 6
    ids, starts, select, _ = _packed(episodes)
    policy.score_packed(ids, starts, select, 1.0)
    assert sum(counted) == 3
    asyncio.run(engine.close())


def test_where_every_layer_is_adapted_nothing_is_kept(random_model):
    assert LoraPolicy(random_model("Llama"), LoraSection(r=4), seed=0).hidden_states is None
    targets = ("query_key_value",)
    assert LoraPolicy(random_model("GPTNeoX"), LoraSection(r=4, top_layers=1, target_modules=targets), seed=0).hidden_states is None
