"""The decoder's matrix products: laid out once for oneDNN beside plain ones (MKL), over all matrices of SmolLM2, by number of rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from sandmill.models.llama import FusedLinear
from sandmill.models.products import product

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
console = Console(stderr=True)


def median_ms(action: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows, by commas.")] = "16,64,256",
    threads: Annotated[int, typer.Option(help="torch's threads.")] = 2,
    rounds: Annotated[int, typer.Option(help="Of each; the median counts.")] = 7,
) -> None:
    """One forward's worth of products for each number of rows, both ways in turn."""
    torch.set_num_threads(threads)
    weights = [torch.randn(shape) for shape in (*SHAPES * LAYERS, HEAD)]
    products = [product(FusedLinear(weight, None, None, None)) for weight in weights]
    table = Table("rows", "plain, ms", "laid out, ms", "times as fast", title=f"{len(weights)} products, {threads} threads")
    with torch.no_grad():
        for count in map(int, rows.split(",")):
            inputs: Sequence[torch.Tensor] = [torch.randn(count, weight.shape[1]) for weight in weights]
            plain = median_ms(lambda inputs=inputs: [functional.linear(x, w) for x, w in zip(inputs, weights, strict=True)], rounds)
            laid_out = median_ms(lambda inputs=inputs: [p(x) for x, p in zip(inputs, products, strict=True)], rounds)
            table.add_row(str(count), f"{plain:.1f}", f"{laid_out:.1f}", f"{plain / laid_out:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
