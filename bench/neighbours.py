"""How much one sandbox's attack slows the commands of another. Exit code 1 when any slows them beyond 1.2 times.

Rounds alternate between quiet and attack, so that whatever else the machine does hits both; medians of a neighbour's `true` and of its
small file writes are compared. Every attack runs as the sandbox's user with all that its limits (one core, 256 MiB, 16 MiB) allow.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sandmill.sandboxes import Process, Sandbox, SandboxSpec

SPEC = SandboxSpec.of(cpu=1, memory="256Mi", disk="16Mi", idle_timeout="1h")
SLOWER_MOST = 1.2
ATTACKS = {
    "fork bomb": "import os\nwhile True:\n  try:\n    os.fork()\n  except OSError:\n    pass",
    "256 spinning processes": ("import os\nfor _ in range(7):\n  try:\n    os.fork()\n  except OSError:\n    pass\nwhile True: pass"),
    "memory hog": ("import subprocess, sys\nwhile True:\n  subprocess.run([sys.executable, '-c', 'bytearray(400 << 20)'])"),
    "full disk": "while True:\n  try:\n    open('f', 'wb').write(b'x' * (32 << 20))\n  except OSError:\n    pass",
    "inodes": (
        "import os\n"
        "n = 0\n"
        "while True:\n"
        "  try:\n"
        "    open(f'i{n}', 'w').close(); n += 1\n"
        "  except OSError:\n"
        "    [os.unlink(f'i{k}') for k in range(n)]; n = 0"
    ),
    "output flood": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "descriptors": (
        "import os\n"
        "while True:\n"
        "  held = []\n"
        "  try:\n"
        "    while True: held += os.pipe()\n"
        "  except OSError:\n"
        "    [os.close(fd) for fd in held]"
    ),
    "loopback storm": (
        "import socket\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "while True:\n"
        "  c = socket.create_connection(s.getsockname()); s.accept()[0].close(); c.close()"
    ),
    "system calls": ("import ctypes\nc = ctypes.CDLL(None)\nwhile True: c.mount(b'none', b'/tmp', b'tmpfs', 0, 0); c.unshare(0x10000000)"),
    "signals to init": "import os\nwhile True:\n  try:\n    os.kill(1, 9)\n  except OSError:\n    pass",
}
console = Console(stderr=True)


def clock(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def sample(neighbour: Sandbox, count: int) -> list[list[float]]:
    """Seconds of a command and of a write."""
    return [
        [clock(lambda: neighbour.run("true")) for _ in range(count)],
        [clock(lambda: neighbour.write("file", b"contents\n")) for _ in range(count)],
    ]


def begin(attacker: Sandbox, script: str) -> Process:
    """The attack, under way. Ends the benchmark when it ends by itself: then it was none."""
    attack = attacker.exec("python3", "-c", script, max_output=65536)
    time.sleep(0.2)
    if attack.returncode is not None and attack.returncode >= 0:
        raise SystemExit(f"the attack ended by itself (exit code {attack.returncode}): {attack.stderr.read()}\n{script}")
    return attack


def under_attack(script: str, neighbour: Sandbox, rounds: int, count: int) -> tuple[list[list[float]], list[list[float]]]:
    """The neighbour's seconds in quiet and in attack, round by round."""
    quiet: list[list[float]] = [[], []]
    attacked: list[list[float]] = [[], []]
    for _ in range(rounds):
        for found, more in zip(quiet, sample(neighbour, count), strict=True):
            found += more
        with Sandbox.from_spec(SPEC) as attacker:
            attack = begin(attacker, script)
            for _ in range(count // 10):
                if attack.returncode is not None:  # a limit of the sandbox ended it (a flood of output, for one): once more
                    attack = begin(attacker, script)
                for found, more in zip(attacked, sample(neighbour, 10), strict=True):
                    found += more
        time.sleep(0.1)
    return quiet, attacked


def main(
    rounds: Annotated[int, typer.Option(help="Alternations of quiet and attack.")] = 5,
    count: Annotated[int, typer.Option(help="Commands and writes in each.")] = 60,
) -> None:
    """Runs every attack and prints how a neighbour fared."""
    table = Table("attack", "true, quiet ms", "attacked", "times", "write, quiet ms", "attacked", "times")
    worst = 0.0
    with Sandbox.from_spec(SPEC) as neighbour:
        sample(neighbour, 20)
        for name, script in ATTACKS.items():
            quiet, attacked = under_attack(script, neighbour, rounds, count)
            row = [name]
            for before, during in zip(quiet, attacked, strict=True):
                one, other = 1e3 * statistics.median(before), 1e3 * statistics.median(during)
                worst = max(worst, other / one)
                row += [f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}"]
            table.add_row(*row)
    console.print(table)
    console.print(f"worst: {worst:.2f} times (at most {SLOWER_MOST})")
    sys.exit(1 if worst > SLOWER_MOST else 0)


if __name__ == "__main__":
    typer.run(main)
