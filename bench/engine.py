"""Sampled tokens per second of the embedded engine beside transformers' generate: same weights, prompts, batch and token counts.

Both sides sample at temperature 1 without a stop token, one after the other, in rounds that alternate; the median round counts. A
group of rows shares its prompt, as in GRPO. The engine's further turns, with an observation each, are a line of their own:
generate has no such thing, it would have to read the whole episode again.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from sandmill.models.engines.torch import TorchEngine
from sandmill.models.loading import SMOLLM2, TINY_SHELL, LoadedModel, load
from sandmill.models.model import Sampling

PRESETS = {
    "tiny": {"uri": TINY_SHELL, "rows": 384, "group": 16, "prompt": 14, "new_tokens": 9, "turns": 3, "observation": 6},
    "smollm2": {"uri": SMOLLM2, "rows": 32, "group": 32, "prompt": 200, "new_tokens": 64, "turns": 1, "observation": 16},
}
console = Console(stderr=True)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sampled. Lengths in tokens; `group` rows share a prompt."""

    uri: str
    rows: int
    group: int
    prompt: int
    new_tokens: int
    turns: int
    observation: int

    def prompts(self, vocabulary: int) -> list[list[int]]:
        draw = random.Random(0)
        groups = [[draw.randrange(4, vocabulary) for _ in range(self.prompt)] for _ in range(-(-self.rows // self.group))]
        return [groups[row // self.group] for row in range(self.rows)]


def engine_round(engine: TorchEngine, prompts: list[list[int]], work: Load, turns: int, seed: int) -> float:
    """Tokens sampled per second, prompts included in the time."""
    sampling = Sampling(max_new_tokens=work.new_tokens, stop_ids=frozenset())
    observation = list(range(20, 20 + work.observation))

    async def episode(row: int) -> None:
        session = await engine.session(seed=seed + row)
        for turn in range(turns):
            await session.sample(observation if turn else prompts[row], sampling)
        await session.close()

    async def episodes() -> None:
        await asyncio.gather(*(episode(row) for row in range(len(prompts))))

    start = time.perf_counter()
    asyncio.run(episodes())
    return len(prompts) * turns * work.new_tokens / (time.perf_counter() - start)


def generate_round(loaded: LoadedModel, prompts: list[list[int]], work: Load, seed: int) -> float:
    ids = torch.tensor(prompts)
    torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.inference_mode():
        loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=work.new_tokens,
            min_new_tokens=work.new_tokens,
            do_sample=True,
            top_k=0,
            temperature=1.0,
            pad_token_id=0,
        )
    return len(prompts) * work.new_tokens / (time.perf_counter() - start)


def measure(work: Load, threads: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    loaded = load(work.uri)
    prompts = work.prompts(int(loaded.model.config.vocab_size))
    context = work.prompt + work.turns * (work.new_tokens + work.observation) + 1
    engine = TorchEngine(loaded, rows=work.rows, context_length=context, threads=threads)
    sides = {
        "generate": lambda number: generate_round(loaded, prompts, work, number),
        "engine": lambda number: engine_round(engine, prompts, work, 1, number * 1000),
    }
    if work.turns > 1:
        sides[f"engine, {work.turns} turns"] = lambda number: engine_round(engine, prompts, work, work.turns, number * 1000)
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, run in sides.items():
            figure = run(number)
            if number:
                samples[side].append(figure)
    asyncio.run(engine.close())
    return {side: statistics.median(figures) for side, figures in samples.items()}


def main(
    model: Annotated[str, typer.Option(help="tiny or smollm2.")] = "tiny",
    threads: Annotated[int, typer.Option(help="Torch threads, of both sides.")] = 1,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after one that is not.")] = 5,
    rows: Annotated[int | None, typer.Option(help="Rows at once.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Measures and prints."""
    if model not in PRESETS:
        raise typer.BadParameter(f"{model} is no preset; use {' or '.join(PRESETS)}")
    preset = PRESETS[model] | ({"rows": rows} if rows else {})
    work = Load(**preset)  # type: ignore[arg-type]
    figures = measure(work, threads, rounds)
    if as_json:
        print(json.dumps({"workload": asdict(work), "threads": threads, "tokens_per_second": figures}, indent=2))
        return
    table = Table("side", "sampled tokens/s", "of generate", title=f"{work.uri}, {work.rows} rows, {threads} thread(s)")
    for side, figure in figures.items():
        table.add_row(side, f"{figure:,.0f}", f"{figure / figures['generate']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
