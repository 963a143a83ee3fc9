"""Sandboxes beside bubblewrap and crun: start to first output and to the end of the command, exec overhead, forks, 500 idle ones, teardown.

Peers run in the same rounds, one after the other, so that whatever else the machine does hits all alike. Medians and 99th
percentiles in milliseconds. `scripts/bench sandboxes [--quick] [--json FILE] [--rounds N] [--idle N]`.

crun refuses hybrid control groups (a version 2 hierarchy beside version 1); where both are mounted, the whole benchmark runs in a
mount namespace of its own without the version 2 one. Its commands are in the table's notes. gVisor, where `runsc` is installed, takes
part in every fifth round, by itself and as a backend (bench/sandboxes_gvisor.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import sandboxes_gvisor
from rich.console import Console
from rich.table import Table

from sandmill.sandboxes import Pool, Sandbox, SandboxSpec, block_on
from sandmill.sandboxes.backends.native import node

SPEC = SandboxSpec.of(cpu=1, memory="512Mi", disk="64Mi", idle_timeout="1h")
SMALL = SandboxSpec.of(cpu=1, memory="64Mi", disk="8Mi", idle_timeout="1h")
HYBRID = Path("/sys/fs/cgroup/unified")


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds of one operation over all rounds."""

    name: str
    minimum: float
    median: float
    p99: float
    rounds: int

    @classmethod
    def of(cls, name: str, seconds: list[float]) -> Timing:
        ordered = sorted(value * 1e3 for value in seconds)
        return cls(name, ordered[0], statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))], len(ordered))


class Idle(msgspec.Struct, frozen=True):
    """Many sandboxes alive and doing nothing."""

    count: int
    create_s: float
    creations_per_s: float
    pss_kib_each: float
    memory_kib_each: float
    """Fall of the machine's available memory, per sandbox."""
    answer: Timing
    command: Timing
    teardown_s: float


def clock(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def first_output(argv: list[str]) -> float:
    """Seconds from the call to the first byte of output; then waits for the end."""
    began = time.perf_counter()
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - began
        if not first:
            raise SystemExit(f"{argv[0]} printed nothing: {process.stderr.read().decode(errors='replace').strip()}")
    return elapsed


def bubblewrap_command() -> list[str] | None:
    program = shutil.which("bwrap")
    if program is None:
        return None
    merged = [name for name in ("bin", "sbin", "lib", "lib64") if Path("/", name).is_symlink()]
    links = [part for name in merged for part in ("--symlink", f"usr/{name}", f"/{name}")]
    walls = ["--unshare-all", "--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    return [program, *walls, "--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "/bin/echo", "hi"]


def crun_bundle(folder: Path) -> list[str] | None:
    """A bundle with what `crun spec` proposes (all namespaces, limits, capabilities), the host's /usr as programs, and `echo hi`."""
    program = shutil.which("crun")
    if program is None or os.geteuid() != 0:
        return None
    root = folder / "rootfs"
    for name in ("usr", "proc", "dev", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    subprocess.run([program, "spec"], cwd=folder, check=True)
    config = json.loads((folder / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": ["/bin/echo", "hi"]}
    config["process"]["user"] = {"uid": 1000, "gid": 1000}
    config["mounts"] = [mount for mount in config["mounts"] if mount["destination"] != "/sys/fs/cgroup"]
    config["mounts"].append({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]})
    config["linux"]["resources"] = {"memory": {"limit": 512 << 20}, "pids": {"limit": 256}, "cpu": {"quota": 100_000, "period": 100_000}}
    (folder / "config.json").write_text(json.dumps(config))
    return [program, "run", "--bundle", str(folder)]


def whole_run(argv: list[str]) -> float:
    """Seconds from the call to the end of the process, with all of its output."""
    return clock(partial(subprocess.run, argv, stdin=subprocess.DEVNULL, capture_output=True, check=True))


def cold_start() -> float:
    """Seconds from the call to the first piece of output, as `first_output` counts it."""
    began = time.perf_counter()
    box = Sandbox.from_spec(SPEC)
    process = box.exec("/bin/echo", "hi", text=False)
    first = next(iter(process.stdout))
    elapsed = time.perf_counter() - began
    assert first
    process.wait()
    box.terminate()
    return elapsed


def cold_run() -> float:
    """Seconds from the call to a command's exit code and all of its output."""
    began = time.perf_counter()
    box = Sandbox.from_spec(SPEC)
    box.run("/bin/echo", "hi")
    elapsed = time.perf_counter() - began
    box.terminate()
    return elapsed


def create_alone() -> float:
    began = time.perf_counter()
    box = Sandbox.from_spec(SPEC)
    elapsed = time.perf_counter() - began
    box.terminate()
    return elapsed


def pooled_start(pool: Pool) -> float:
    while not pool.ready:
        time.sleep(0.001)
    time.sleep(0.01)  # the pool's own refilling is not part of taking one
    began = time.perf_counter()
    box = pool.take({"file": b"contents\n"})
    box.run("/bin/echo", "hi")
    elapsed = time.perf_counter() - began
    box.terminate()
    return elapsed


def starts(rounds: int, folder: Path) -> list[Timing]:
    """Start to first output of everything that is installed, interleaved."""
    bubblewrap, crun = bubblewrap_command(), crun_bundle(folder)
    samples: dict[str, list[float]] = {}
    with Pool(SPEC, 2) as pool:
        cold_start()
        for number in range(rounds):
            actions: list[tuple[str, Callable[[], float]]] = [
                ("bare subprocess", lambda: first_output(["/bin/echo", "hi"])),
                ("sandmill, cold", cold_start),
                ("sandmill, cold, awaited", lambda: block_on(own_first_output(0))),
                ("sandmill, cold, to its end", cold_run),
                ("sandmill, from a pool", lambda: pooled_start(pool)),
                ("sandmill, create alone", create_alone),
            ]
            if bubblewrap:
                actions.append(("bubblewrap", lambda: first_output(bubblewrap)))
                actions.append(("bubblewrap, to its end", lambda: whole_run(bubblewrap)))
            if crun:
                actions.append(("crun", partial(first_output, [*crun, f"bench-{os.getpid()}-{number}"])))
            actions += sandboxes_gvisor.starts(folder / "gvisor", SPEC, first_output, number)
            random.Random(number).shuffle(actions)  # what one leaves for the kernel to clean up must not always hit the same next one
            for name, action in actions:
                samples.setdefault(name, []).append(action())
    return [Timing.of(name, seconds) for name, seconds in samples.items()]


async def crowd(count: int, one: Callable[[int], Awaitable[float]]) -> list[float]:
    """Seconds of `count` starts that are asked for in the same moment, each from its own call to its own first output."""
    return list(await asyncio.gather(*(one(number) for number in range(count))))


async def own_first_output(_: int) -> float:
    began = time.perf_counter()
    async with await Sandbox.from_spec.aio(SPEC) as box:
        process = await box.exec.aio("/bin/echo", "hi", text=False)
        await anext(aiter(process.stdout))
        elapsed = time.perf_counter() - began
        await process.wait.aio()
        return elapsed


async def peers_first_output(argv: Callable[[int], list[str]], number: int) -> float:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*argv(number), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    elapsed = time.perf_counter() - began
    await process.wait()
    return elapsed


def crowds(sizes: Sequence[int], folder: Path) -> list[Timing]:
    """Many starts at once, of everything that is installed, one kind after the other."""
    bubblewrap, crun = bubblewrap_command(), crun_bundle(folder)
    found = []
    for size in sizes:
        found.append(Timing.of(f"{size} at once: sandmill", block_on(crowd(size, own_first_output))))
        if bubblewrap:
            found.append(
                Timing.of(f"{size} at once: bubblewrap", asyncio.run(crowd(size, partial(peers_first_output, lambda _: bubblewrap))))
            )
        if crun:
            stem = f"bench-{os.getpid()}-crowd-{size}"
            found.append(
                Timing.of(
                    f"{size} at once: crun",
                    asyncio.run(crowd(size, partial(peers_first_output, lambda number, stem=stem: [*crun, f"{stem}-{number}"]))),
                )
            )
    return found


def execs(rounds: int) -> list[Timing]:
    """A command in a running sandbox, awaited and blocking, beside a bare subprocess that also collects output."""
    programs = (("true", ["true"]), ("bash", ["bash", "-c", "echo hi"]), ("python3", ["/usr/bin/python3", "-c", "pass"]))
    samples: dict[str, list[float]] = {}

    async def awaited(box: Sandbox, argv: list[str]) -> float:
        began = time.perf_counter()
        await box.run.aio(*argv)
        return time.perf_counter() - began

    with Sandbox.from_spec(SPEC) as box, sandboxes_gvisor.box(SPEC) as other:
        for number in range(rounds):
            for name, argv in programs:
                if other is not None and number % sandboxes_gvisor.SELDOM == 0:
                    samples.setdefault(f"{name}: sandbox on gVisor", []).append(block_on(awaited(other, argv)))
                samples.setdefault(f"{name}: subprocess", []).append(clock(partial(subprocess.run, argv, capture_output=True)))
                samples.setdefault(f"{name}: sandbox", []).append(block_on(awaited(box, argv)))
                samples.setdefault(f"{name}: sandbox, blocking", []).append(clock(partial(box.run, *argv)))
            samples.setdefault("ping", []).append(clock(box.ping))
            samples.setdefault("write 1 kB and read it", []).append(clock(lambda: (box.write("f", b"x" * 1000), box.read("f"))))
    return [Timing.of(name, seconds) for name, seconds in samples.items()]


def available_kib() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))


def pss_kib(pids: list[int]) -> int:
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(line.split()[1]) for text in rollups for line in text.splitlines() if line.startswith("Pss:"))


def idle(count: int) -> Idle:
    async def create() -> list[Sandbox]:
        return list(await asyncio.gather(*(Sandbox.from_spec.aio(SMALL) for _ in range(count))))

    async def terminate(boxes: list[Sandbox]) -> None:
        await asyncio.gather(*(box.terminate.aio() for box in boxes))

    before = available_kib()
    began = time.perf_counter()
    boxes = block_on(create())
    create_s = time.perf_counter() - began
    memory = before - available_kib()
    pss = pss_kib([box._birth.pid for box in boxes if box._birth is not None]) if os.geteuid() == 0 else 0
    answers = [clock(box.ping) for box in boxes]
    commands = [clock(partial(box.run, "/bin/echo", "hi")) for box in boxes]
    teardown = clock(lambda: block_on(terminate(boxes)))
    timings = Timing.of("ping", answers), Timing.of("first echo", commands)
    return Idle(count, create_s, count / create_s, pss / count, memory / count, *timings, teardown)


def episodes(count: int) -> dict[str, float]:
    """A training step's worth: create with ten files, two commands, terminate, 64 at once; wall and this process's own cpu time."""
    files = {f"f{number}": b"line\n" * 50 for number in range(10)}

    async def one(slots: asyncio.Semaphore) -> None:
        async with slots, await Sandbox.from_spec.aio(SPEC, files=files) as box:
            for _ in range(2):
                await box.run.aio("true", timeout=10)

    async def step() -> None:
        slots = asyncio.Semaphore(64)
        await asyncio.gather(*(one(slots) for _ in range(count)))

    cpu = time.process_time()
    wall = clock(lambda: block_on(step()))
    return {"episodes": count, "wall_s": wall, "python_cpu_s": time.process_time() - cpu}


def forks(sizes: Sequence[int], rounds: int) -> list[Timing]:
    """A prepared sandbox into `n`: from the call until every one has run a command that reads what was prepared."""

    async def one(box: Sandbox, n: int) -> None:
        made = await box.fork.aio(n)
        try:
            said = await asyncio.gather(*(child.run.aio("cat", "made/0") for child in made))
            assert all(done.stdout == b"0" for done in said)
        finally:
            await asyncio.gather(*(child.terminate.aio() for child in made))

    samples: dict[str, list[float]] = {}
    with Sandbox.from_spec(SMALL, files={f"made/{number}": str(number).encode() for number in range(100)}) as box:
        for number in range(rounds):
            box.write("changed", str(number))
            for n in sizes:
                samples.setdefault(f"into {n}", []).append(clock(lambda n=n: block_on(one(box, n))))  # type: ignore[misc]
    return [Timing.of(name, seconds) for name, seconds in samples.items()]


def show(console: Console, title: str, timings: list[Timing], base: Callable[[str], str]) -> None:
    """`base` names the row that a row is divided by."""
    table = Table("", "min", "median", "p99", "n", "median of", title=title, title_justify="left")
    medians = {timing.name: timing.median for timing in timings}
    for timing in timings:
        reference = medians.get(base(timing.name))
        ratio = f"{timing.median / reference:.2f} x {base(timing.name)}" if reference and base(timing.name) != timing.name else ""
        table.add_row(timing.name, *(f"{value:.2f}" for value in (timing.minimum, timing.median, timing.p99)), str(timing.rounds), ratio)
    console.print(table)


def show_idle(console: Console, found: Idle, step: dict[str, float]) -> None:
    console.print(f"{found.count} idle sandboxes: made in {found.create_s:.2f} s ({found.creations_per_s:.0f} a second)")
    console.print(f"  each {found.pss_kib_each:.0f} KiB PSS, {found.memory_kib_each:.0f} KiB of the machine's memory")
    for timing in (found.answer, found.command):
        console.print(f"  {timing.name}: {timing.median:.2f} ms median, {timing.p99:.2f} ms p99")
    console.print(f"  all torn down in {found.teardown_s:.2f} s")
    console.print(
        f"a step of {step['episodes']:.0f} episodes (create with 10 files, 2 commands, terminate; 64 at once): {step['wall_s']:.2f} s,"
        f" {step['python_cpu_s']:.2f} s of it Python's own cpu time"
    )


def leave_hybrid_cgroups() -> None:
    """Starts over without the version 2 hierarchy when crun would refuse the mixture."""
    hybrid = HYBRID.is_dir() and any(line.split()[1] == str(HYBRID) for line in Path("/proc/self/mounts").read_text().splitlines())
    if hybrid and os.geteuid() == 0 and shutil.which("crun") and shutil.which("unshare"):
        script = 'umount "$0" && exec "$@"'
        os.execvp("unshare", ["unshare", "-m", "sh", "-c", script, str(HYBRID), sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--idle", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="few rounds: for a look, not for figures to keep")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    leave_hybrid_cgroups()
    rounds, count = (10, 100) if options.quick else (options.rounds, options.idle)
    console = Console()
    console.print(f"{platform.release()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        started = starts(rounds, Path(folder, "one"))
        crowded = crowds((50, min(count, 500)), Path(folder, "many"))
    executed = execs(rounds)
    resting = idle(count)
    step = episodes(min(count, 500))
    forked = forks((1, 8, 100), max(5, rounds // 10))
    show(console, "start to first output (ms)", started, lambda name: "bubblewrap")
    show(console, "start to first output, all asked for at once (ms)", crowded, lambda name: f"{name.split(':')[0]}: bubblewrap")
    show(console, "one command (ms)", executed, lambda name: f"{name.split(':')[0]}: subprocess")
    show(console, "fork of a prepared sandbox, to the last one's first output and its end (ms)", forked, lambda name: "into 1")
    show_idle(console, resting, step)
    lacks = node._node.lacks if node._node else None
    if lacks:
        console.print(lacks)
    if options.json:
        machine = {"kernel": platform.release(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        figures = machine | {"starts": started, "crowds": crowded, "execs": executed, "forks": forked, "idle": resting, "step": step}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
