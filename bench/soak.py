"""Sandboxes under continuous load: does anything fail, leak or slow down? Ends with exit code 1 when something does.

Workers make a sandbox, write and read files, run commands (a flood, a failure and a timeout with a process tree among them), and end
it, one after another, for `--minutes`. Latencies are kept by tenth of the run (and judged when a tenth is at least a minute), and before
and after it everything that could pile up is counted: processes, descriptors, control groups, network namespaces, mounts, memory.

Beside them, at random moments, the same command runs as a bare process of the machine: where others use the machine too, drift is what
sandboxes became slower by and that did not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sandmill.sandboxes import Pool, Sandbox, SandboxSpec, block_on
from sandmill.sandboxes.backends.native import node as nodes

SPEC = SandboxSpec.of(cpu=1, memory="256Mi", disk="16Mi", idle_timeout="1h")
FILES = {f"folder/{number}.txt": f"line {number}\n".encode() * 40 for number in range(10)}
TENTHS = 10
PEER = "bare command"
SLOWER_MOST = 1.1
TREE = "for i in 1 2 3; do (trap '' TERM; setsid sleep 60) & done; wait"
console = Console(stderr=True)


@dataclass
class Load:
    """What was measured so far."""

    began: float
    lasts_s: float
    seconds: dict[str, list[array[float]]] = field(default_factory=lambda: defaultdict(lambda: [array("d") for _ in range(TENTHS)]))
    """Arrays: a million samples must not look like a leak."""
    failures: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    pace_s: float = 0.0
    """Seconds that one life of one worker takes at least."""

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.began + self.lasts_s

    async def timed(self, name: str, work: Awaitable[Any]) -> Any:
        tenth = min(TENTHS - 1, int(TENTHS * (time.monotonic() - self.began) / self.lasts_s))
        start = time.perf_counter()
        result = await work
        self.seconds[name][tenth].append(time.perf_counter() - start)
        return result

    def expect(self, name: str, holds: bool) -> None:
        if not holds:
            self.failures[name] += 1


async def bare(folder: str) -> None:
    """The peer: the sandboxes' first command without a sandbox."""
    argv = ("bash", "-c", "cat folder/*.txt | wc -l")
    process = await asyncio.create_subprocess_exec(*argv, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    await process.communicate()


async def one(load: Load, pool: Pool, pick: random.Random) -> None:
    """One sandbox's life."""
    pooled = pick.random() < 0.5
    box: Sandbox = await load.timed("create", pool.take.aio(FILES) if pooled else Sandbox.from_spec.aio(SPEC, files=FILES))
    try:
        done = await load.timed("command", box.run.aio("bash", "-c", "cat folder/*.txt | wc -l", timeout=30))
        load.expect("a command's output", done.stdout == b"400\n")
        await load.timed("write", box.write.aio("made.bin", os.urandom(4096)))
        load.expect("a file read back", len(await load.timed("read", box.read.aio("made.bin"))) == 4096)
        done = await load.timed("failure", box.run.aio("bash", "-c", "exit 3", timeout=30))
        load.expect("an exit code", done.exit_code == 3)
        if pick.random() < 0.1:
            done = await box.run.aio("bash", "-c", TREE, timeout=0.05)
            load.expect("a timeout", done.timed_out)
            left = await box.run.aio("pgrep", "-c", "sleep", timeout=30)
            load.expect("a tree killed by its timeout", left.stdout == b"0\n")
        if pick.random() < 0.05:
            done = await box.run.aio("bash", "-c", "head -c 3000000 /dev/zero", timeout=30, max_output=65536)
            load.expect("a flood cut at the limit", done.truncated and len(done.stdout) == 65536)
    finally:
        await load.timed("terminate", box.terminate.aio())
    load.rounds += 1


async def worker(load: Load, pool: Pool, number: int, folder: str) -> None:
    pick = random.Random(number)
    while not load.over:
        began = time.monotonic()
        try:
            await one(load, pool, pick)
            if pick.random() < 0.25:
                await load.timed(PEER, bare(folder))
        except Exception as error:  # noqa: BLE001 - a failure is a figure here
            load.failures[f"{type(error).__name__}: {error}"] += 1
        await asyncio.sleep(max(0.0, began + load.pace_s * pick.uniform(0.5, 1.5) - time.monotonic()))


def held() -> dict[str, float]:
    """Everything of this process and its warden that could pile up."""
    node = nodes._node
    assert node is not None
    warden = node._process.pid
    groups = [folder for root in node.claim.cgroups for folder in root.iterdir() if folder.is_dir()]
    links = [os.readlink(link) for link in Path(f"/proc/{warden}/fd").iterdir()]
    rollup = {pid: Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in (os.getpid(), warden)}
    rss = {pid: next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:")) for pid, text in rollup.items()}
    return {
        "sandboxes": len(list(node.registry.records())),
        "processes below the warden": len(Path(f"/proc/{warden}/task/{warden}/children").read_text().split()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "warden's descriptors": len(links),
        "network namespaces": sum(link.startswith("net:") for link in links),
        "control groups": len(groups),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "files of its state": len(list(node.claim.folder.iterdir())),
        "tasks": len(asyncio.all_tasks()),
        "own memory, MiB": rss[os.getpid()] / 1024,
        "warden's memory, MiB": rss[warden] / 1024,
    }


async def settled() -> dict[str, float]:
    """`held` once what waits for a next sandbox has gone."""
    await asyncio.sleep(5)
    return held()


def p99(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))] if ordered else float("nan")


async def run(load: Load, workers: int, progress: Callable[[], Awaitable[None]]) -> tuple[dict[str, float], dict[str, float]]:
    """The load, and what was held before and after it."""
    async with await Sandbox.from_spec.aio(SPEC) as box:  # the warden starts, and what is made once is made
        await box.run.aio("true")
    before = await settled()
    load.began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, data in FILES.items():
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_bytes(data)
        await bare(folder)
        async with Pool(SPEC, workers) as pool:
            shown = asyncio.create_task(progress())
            await asyncio.gather(*(worker(load, pool, number, folder) for number in range(workers)))
            shown.cancel()
    return before, await settled()


def verdicts(load: Load, before: dict[str, float], after: dict[str, float]) -> list[str]:
    """What is wrong, in sentences."""
    wrong = [f"{count} times: {what}" for what, count in load.failures.most_common(10)]
    for name, count in after.items():
        if name.endswith("MiB"):
            if count > before[name] * 1.2 + 16:
                wrong.append(f"{name}: {before[name]:.0f} before, {count:.0f} after")
        elif count > before[name]:
            wrong.append(f"{name}: {before[name]:.0f} before, {count:.0f} after")
    peer = drift(load.seconds[PEER])
    for name, tenths in load.seconds.items() if load.lasts_s >= TENTHS * 60 else ():
        if name != PEER and drift(tenths) > SLOWER_MOST * max(1.0, peer):
            first, last = p99(tenths[0]), p99(tenths[-1])
            wrong.append(
                f"{name}: p99 {last:.1f} ms in the last tenth, {first:.1f} in the first; a bare command's drifted {peer:.2f} times"
            )
    return wrong


def drift(tenths: Sequence[Sequence[float]]) -> float:
    """The last tenth's p99 over the first's."""
    return p99(tenths[-1]) / p99(tenths[0])


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 90.0,
    workers: Annotated[int, typer.Option(help="Sandboxes at work at once.")] = 4,
    rate: Annotated[float, typer.Option(help="Sandboxes a second at most; 0: as many as it can.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Runs the load and says what failed, leaked or became slower."""
    load = Load(time.monotonic(), minutes * 60, pace_s=workers / rate if rate else 0.0)
    with Progress(console=console) as bar:
        task = bar.add_task("load", total=load.lasts_s)

        async def progress() -> None:
            while True:
                bar.update(
                    task, completed=time.monotonic() - load.began, description=f"{load.rounds} sandboxes, {load.failures.total()} failures"
                )
                await asyncio.sleep(0.5)

        before, after = block_on(run(load, workers, progress))
    wrong = verdicts(load, before, after)
    rows = {name: [[p99(tenth) for tenth in tenths], sum(map(len, tenths))] for name, tenths in load.seconds.items()}
    if as_json:
        figures = {"sandboxes": load.rounds, "minutes": minutes, "p99_ms_by_tenth": rows, "before": before, "after": after, "wrong": wrong}
        print(json.dumps(figures, indent=2))
    else:
        table = Table("p99, ms", "first tenth", "fifth", "last", "last / first", "n", title=f"{load.rounds} sandboxes in {minutes:g} min")
        for name, (tenths, count) in rows.items():
            table.add_row(name, *(f"{tenths[place]:.1f}" for place in (0, 4, -1)), f"{tenths[-1] / tenths[0]:.2f}", str(count))
        console.print(table)
        console.print(", ".join(f"{name} {before[name]:.0f} -> {count:.0f}" for name, count in after.items()))
    for sentence in wrong:
        console.print(f"[red]wrong[/red] {sentence}", highlight=False)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
