"""Commands that run out of time: is their whole process tree dead at once, and is what they wrote kept? Exit code 1 when not.

Each command starts a tree that ignores signals, makes sessions of its own and orphans itself twice over, prints, and then spins or
sleeps past its timeout. When `run` returns, nothing of it may live, and everything printed before the deadline must be there.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from sandmill.sandboxes import Sandbox, SandboxSpec, block_on

SPEC = SandboxSpec.of(cpu=1, memory="128Mi", disk="8Mi", idle_timeout="1h")
LIMIT_S = 0.1
BRANCH = {
    "ignores signals": "(trap '' TERM INT HUP QUIT; while :; do sleep 1; done) &",
    "a session of its own": "setsid sh -c 'while :; do sleep 1; done' &",
    "orphaned twice": "(setsid sh -c '(sleep 60 &) ; exit' &) ;",
    "spins": "(while :; do :; done) &",
}
console = Console(stderr=True)


class Found:
    """Late kills, survivors and lost output over all commands."""

    def __init__(self) -> None:
        self.over_s: list[float] = []
        self.alive = 0
        self.lost = 0
        self.not_timed_out = 0


async def one(box: Sandbox, pick: random.Random, timeout_s: float, found: Found) -> None:
    """One command that runs out of time, and a look at what is left of it."""
    script = "".join(branch for branch in BRANCH.values() if pick.random() < 0.6) + " echo kept; exec sleep 60"
    began = time.perf_counter()
    done = await box.run.aio("bash", "-c", script, timeout=timeout_s)
    found.over_s.append(time.perf_counter() - began - timeout_s)
    found.not_timed_out += not done.timed_out
    found.lost += done.stdout != b"kept\n"
    left = await box.run.aio("pgrep", "-c", "-u", "user", "sleep|bash|sh", timeout=10)
    found.alive += left.stdout.strip() not in (b"0", b"")


async def worker(commands: int, seed: int, timeout_s: float, found: Found) -> None:
    pick = random.Random(seed)
    async with await Sandbox.from_spec.aio(SPEC) as box:
        for _ in range(commands):
            await one(box, pick, timeout_s, found)


def main(
    commands: Annotated[int, typer.Option(help="How many.")] = 10_000,
    workers: Annotated[int, typer.Option(help="Sandboxes at once.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds each command gets; it must be able to print by then.")] = 0.2,
) -> None:
    """Runs them and says how late the last tree died."""
    found = Found()

    async def all_of_them() -> None:
        with Progress(console=console) as bar:
            task = bar.add_task("commands", total=commands)
            share = [commands // workers + (number < commands % workers) for number in range(workers)]
            running = asyncio.gather(*(worker(count, number, timeout, found) for number, count in enumerate(share)))
            while not running.done():
                bar.update(task, completed=len(found.over_s))
                await asyncio.wait([running], timeout=0.5)
            await running

    block_on(all_of_them())
    over = sorted(found.over_s)
    late = sum(value > LIMIT_S for value in over)
    console.print(
        f"{len(over)} commands: all of the tree dead {1e3 * statistics.median(over):.1f} ms after the deadline (median),"
        f" {1e3 * over[round(0.99 * (len(over) - 1))]:.1f} p99, {1e3 * over[-1]:.1f} at most; {late} later than {1e3 * LIMIT_S:.0f} ms,"
        f" {found.alive} with a survivor, {found.lost} with output lost, {found.not_timed_out} not timed out"
    )
    sys.exit(1 if late or found.alive or found.lost or found.not_timed_out else 0)


if __name__ == "__main__":
    typer.run(main)
