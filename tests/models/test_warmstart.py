"""Supervised steps teach what the demonstrations show, the same way every time."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from sandmill.config.manifest import LoraSection
from sandmill.environments.demonstration import Demonstration, Segment
from sandmill.environments.task import Message
from sandmill.errors import ConfigError, NonFinite
from sandmill.models import warmstart
from sandmill.models.chat import dialogue_for
from sandmill.models.engines.torch import TorchEngine
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.model import Sampling
from sandmill.models.warmstart import warm_start


def _demonstrations(seed=0):
    """Copy the word of the task: `Q: w5`, `$ w5`, an output, `= that output`."""
    draw = random.Random(seed)
    while True:
        word, output = f"w{draw.randrange(40)}", f"w{draw.randrange(40, 80)}"
        lines = (
            (f"Q: {word}\n", 0.1),
            (f"$ {word}\n", 1.0),
            (f"{output} {output}\n" if draw.random() < 0.5 else f"{output}\n", 0.1),
            (f"= {output}\n", 1.0),
        )
        yield Demonstration(tuple(Segment(text, weight) for text, weight in lines))


def _teach(loaded, steps, policy=None, seed=0, learning_rate=4e-3):
    losses = []
    warm_start(
        loaded,
        _demonstrations(),
        steps=steps,
        batch_size=16,
        learning_rate=learning_rate,
        seed=seed,
        policy=policy,
        progress=lambda at: losses.append(at.loss),
    )
    return losses


def test_a_tiny_agent_learns_to_copy(tiny):
    losses = _teach(tiny, 220)
    assert losses[-1] < 0.35 < 3 < losses[0]
    dialogue = dialogue_for(tiny)

    async def main():
        engine = TorchEngine(tiny, rows=8)
        right = 0
        for number in range(10):
            session = await engine.session(seed=number)
            sample = await session.sample(
                dialogue.open([Message.user(f"w{number * 4}")]), Sampling(max_new_tokens=8, stop_ids=dialogue.stop_ids, temperature=0.0)
            )
            await session.close()
            await session.close()
            right += dialogue.text(sample.token_ids) == f"$ w{number * 4}\n"
        await engine.close()
        return right

    assert asyncio.run(main()) >= 8


def test_the_same_arguments_give_the_same_bits_and_leave_no_gradients(random_model):
    first, second, third = (random_model("Llama") for _ in range(3))
    assert _teach(first, 6) == _teach(second, 6) != _teach(third, 6, seed=1)
    for mine, same in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, same)
        assert mine.grad is None


@pytest.mark.parametrize("kind", ["Qwen3", "GPTNeoX"])
def test_other_architectures_learn_too(kind, random_model):
    losses = _teach(random_model(kind), 40, learning_rate=2e-3)
    assert min(losses[-5:]) < 0.8 * losses[0]


def test_a_large_model_learns_through_its_adapter_alone(random_model, monkeypatch):
    monkeypatch.setattr(warmstart, "FULL_PARAMETERS_LIMIT", 1000)
    loaded = random_model("Llama")
    with pytest.raises(ConfigError, match="too large"):
        _teach(loaded, 1)
    policy = LoraPolicy(loaded, LoraSection(r=8), seed=0)
    base = {name: parameter.clone() for name, parameter in loaded.model.named_parameters() if "lora_" not in name}
    losses = _teach(loaded, 60, policy)
    assert min(losses[-5:]) < 0.8 * losses[0]
    for name, parameter in loaded.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name])
            assert not parameter.requires_grad


def test_a_small_model_under_an_adapter_learns_in_its_base_and_is_frozen_again(tiny):
    policy = LoraPolicy(tiny, LoraSection(r=4), seed=0)
    adapter = {name: parameter.clone() for name, parameter in policy.trainable().items()}
    losses = _teach(tiny, 20, policy)
    assert losses[-1] < losses[0]
    assert all(torch.equal(parameter, adapter[name]) for name, parameter in policy.trainable().items())
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in tiny.model.named_parameters())


def test_too_few_demonstrations_and_lost_numbers_are_named(tiny):
    few = iter([Demonstration((Segment("Q: w1\n", 0.1), Segment("= w1\n", 1.0)))] * 3)
    with pytest.raises(ConfigError, match="ran out"):
        warm_start(tiny, few, steps=1, batch_size=4, learning_rate=1e-3, seed=0)
    with torch.no_grad():
        tiny.model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(NonFinite, match="warm-start step 1"):
        _teach(tiny, 1)
