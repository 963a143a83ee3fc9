"""Network egress: what it adds to a creation, how fast bytes move, and whether a busy sandbox delays another one's commands.

The servers are a process of their own on loopback, behind the seam where this machine's network is otherwise. Milliseconds.
`scripts/bench egress [--json FILE] [--rounds N]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from sandmill.sandboxes import Egress, Sandbox, SandboxSpec
from sandmill.sandboxes.egress.addresses import Address

PUBLIC = "93.184.216.34"
PAUSE_S = 0.005
POLICIES = {"no network": Egress.deny(), "an allow-list": Egress.allow("a.example.org"), "open egress": Egress.open()}
START = "import socket, time\ncount, start, end = 0, time.time(), time.time() + 1\n"
LOADS = {
    "nothing": "time.sleep(1)",
    "a loop without network": "while time.time() < end: pass",
    "a download": f"s = socket.create_connection(('{PUBLIC}', 80))\nwhile time.time() < end: count += len(s.recv(1 << 20))",
    "packets of one byte": (
        f"s = socket.create_connection(('{PUBLIC}', 81)); s.setsockopt(6, 1, 1)\nwhile time.time() < end: count += s.send(b'x')"
    ),
    "connections": (
        "while time.time() < end:\n"
        f"  try: socket.create_connection(('{PUBLIC}', 81), timeout=1).close(); count += 1\n"
        "  except OSError: pass"
    ),
    "DNS queries": (
        "s = socket.socket(2, 2); s.connect(('127.0.0.1', 53))\n"
        "while time.time() < end: count += s.send(b'\\0\\7\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\1a\\3org\\0\\0\\1\\0\\1') > 0"
    ),
}


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds over all rounds."""

    name: str
    median: float
    p99: float
    said: str = ""

    @classmethod
    def of(cls, name: str, seconds: list[float], said: str = "") -> Timing:
        ordered = sorted(value * 1e3 for value in seconds)
        return cls(name, statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))], said)


class Loopback:
    """`Outside` whose two ports lead to the servers."""

    def __init__(self, ports: dict[int, int]) -> None:
        self._ports = ports

    def lookup(self, name: str) -> Future[list[Address]]:
        future: Future[list[Address]] = Future()
        future.set_exception(OSError(f"no such name: {name}"))
        return future

    async def connect(self, address: Address, port: int) -> socket.socket:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._ports[port]))
        return connection


def pour(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes(1 << 20))


def swallow(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


def serve(pipe: Connection) -> None:
    """The servers' process: sends its ports and ends when the pipe does."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for listener, talk in zip(listeners, (pour, swallow), strict=True):
        threading.Thread(target=accept, args=(listener, talk), daemon=True).start()
    pipe.send({80: listeners[0].getsockname()[1], 81: listeners[1].getsockname()[1]})
    pipe.poll(None)


def accept(listener: socket.socket, talk: Callable[[socket.socket], None]) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=quietly, args=(talk, connection), daemon=True).start()


def quietly(talk: Callable[[socket.socket], None], connection: socket.socket) -> None:
    try:
        with connection:
            talk(connection)
    except OSError:
        return


def creations(rounds: int) -> list[Timing]:
    """Creation to the first command's end; the policies take turns."""
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _ in range(rounds):
        for name, network in POLICIES.items():
            start = time.perf_counter()
            with Sandbox.create(memory="64Mi", disk="8Mi", network=network) as sandbox:
                sandbox.run("true")
                times[name].append(time.perf_counter() - start)
    return [Timing.of(f"create with {name}, and `true`", seconds) for name, seconds in times.items()]


def neighbours(outside: Loopback, rounds: int) -> list[Timing]:
    """`true` in one sandbox while another, held to half a core, does something. The loads take turns."""
    spec = SandboxSpec.of(cpu=0.5, memory="256Mi", disk="8Mi", network=Egress.open())
    seconds: dict[str, list[float]] = {name: [] for name in LOADS}
    rates: dict[str, list[int]] = {name: [] for name in LOADS}
    with Sandbox.from_spec(spec, outside=outside) as busy, Sandbox.create(memory="64Mi", disk="8Mi") as quiet:
        for _ in range(rounds):
            for name, load in LOADS.items():
                found, rate = beside(busy, quiet, load)
                seconds[name] += found
                rates[name].append(rate)
    return [Timing.of(f"`true` beside {name}", seconds[name], f"{round(statistics.mean(rates[name])):,} a second") for name in LOADS]


def beside(busy: Sandbox, quiet: Sandbox, load: str) -> tuple[list[float], int]:
    """Seconds of each command, and what the load says it did per second."""
    process = busy.exec("python3", "-c", f"{START}{load}\nprint(round(count / (time.time() - start)))")
    time.sleep(0.2)
    seconds, end = [], time.monotonic() + 0.7
    while time.monotonic() < end:
        start = time.perf_counter()
        quiet.run("true")
        seconds.append(time.perf_counter() - start)
        time.sleep(PAUSE_S)
    return seconds, int(process.stdout.read() or 0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--json", type=Path)
    wanted = options.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    timings = creations(wanted.rounds) + neighbours(Loopback(ours.recv()), max(1, wanted.rounds // 10))
    server.terminate()
    table = Table("operation", "median", "p99", "what the other did")
    for timing in timings:
        table.add_row(timing.name, f"{timing.median:.2f}", f"{timing.p99:.2f}", timing.said)
    Console(width=120).print(table)
    if wanted.json:
        wanted.json.write_text(json.dumps(msgspec.to_builtins(timings), indent=1))


if __name__ == "__main__":
    main()
