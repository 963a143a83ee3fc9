"""A session's tokens and log-probabilities depend on the weights, its own ids and its seed alone: not on neighbours, not on timing."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from sandmill.models.engines.torch import TorchEngine
from sandmill.models.loading import LoadedModel
from sandmill.models.model import Sample, Sampling

WIDE = {"hidden_size": 384, "intermediate_size": 512, "num_attention_heads": 6, "vocab_size": 512, "num_hidden_layers": 2}
"""Every matrix large enough to be laid out for its products."""

Episode = tuple[int, list[list[int]], Sampling]


def _episodes(count: int) -> list[Episode]:
    """Groups of four siblings with one prompt; prompts and observations of many lengths, long and short chunks; mixed sampling."""
    draw = random.Random(7)
    episodes = []
    for index in range(count):
        group = random.Random(index // 4)
        prompt = [group.randrange(4, 90) for _ in range(group.choice([1, 5, 8, 9, 24, 25, 40, 70]))]
        contexts = [prompt] + [[draw.randrange(4, 90) for _ in range(draw.choice([0, 1, 3, 8, 13]))] for _ in range(2)]
        sampling = Sampling(
            max_new_tokens=draw.choice([3, 9, 17]),
            stop_ids=frozenset({3, 10 + index % 5}),
            temperature=draw.choice([1.0, 0.7, 0.0]),
            top_p=draw.choice([1.0, 0.8]),
        )
        episodes.append((1000 + index, contexts, sampling))
    return episodes


async def _play(engine: TorchEngine, episode: Episode, delays: random.Random | None) -> list[Sample]:
    seed, contexts, sampling = episode
    if delays is not None:
        await asyncio.sleep(delays.random() * 0.05)
    session = await engine.session(seed=seed)
    samples = []
    for context in contexts:
        samples.append(await session.sample(context, sampling))
        if delays is not None:
            await asyncio.sleep(delays.random() * 0.01)
    await session.close()
    return samples


async def _alone(loaded: LoadedModel, episodes: list[Episode], threads: int) -> list[list[Sample]]:
    engine = TorchEngine(loaded, rows=1, context_length=128, threads=threads)
    results = [await _play(engine, episode, None) for episode in episodes]
    await engine.close()
    return results


async def _together(loaded: LoadedModel, episodes: list[Episode], threads: int, rows: int, seed: int | None) -> list[list[Sample]]:
    engine = TorchEngine(loaded, rows=rows, context_length=128, threads=threads)
    delays = None if seed is None else random.Random(seed)
    order = list(range(len(episodes)))
    random.Random(seed).shuffle(order)
    running = {index: asyncio.ensure_future(_play(engine, episodes[index], delays)) for index in order}
    results = [await running[index] for index in range(len(episodes))]
    await engine.close()
    return results


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["tiny", "Llama", "wide", "GPTNeoX"])
def test_samples_do_not_depend_on_neighbours_or_timing(kind, threads, tiny, random_model):
    loaded = {"tiny": lambda: tiny, "wide": lambda: random_model("Llama", **WIDE)}.get(kind, lambda: random_model(kind))()
    episodes = _episodes(44 if kind != "GPTNeoX" else 16)
    torch.set_num_threads(threads)
    alone = asyncio.run(_alone(loaded, episodes, threads))
    assert len({sample.token_ids for samples in alone for sample in samples}) > 1.3 * len(episodes)
    assert asyncio.run(_together(loaded, episodes, threads, len(episodes), None)) == alone
    for seed in range(3):
        assert asyncio.run(_together(loaded, episodes, threads, (44, 17, 5)[seed], seed)) == alone
