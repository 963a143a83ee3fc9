"""Sandboxes through the HTTP API on loopback. In: nothing. Out: p50 and p99 from the client's call to the first command's result.

    python bench/server.py [--burst 500]

Starts a server of its own. Requests go over plain connections, one a sandbox, so that the client costs as little as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sandmill.sandboxes.backends.remote.http import Answer, Http

KEY = "sandmill_bench_0123456789abcdef"
BASE = "/apis/nodus.dev/v1/namespaces/default"
SPEC = {"resources": {"memory": "64Mi", "disk": "16Mi"}}


@contextmanager
def serving() -> Iterator[str]:
    """A server in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-c",
            "from sandmill.cli import main; main()",
            "serve",
            "--port",
            "0",
            "--json",
            "--state",
            f"{folder}/state",
        ]
        environment = os.environ | {"SANDMILL_STATE": f"{folder}/sandboxes", "SANDMILL_API_KEY": KEY}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())["url"]
            finally:
                process.terminate()


class Client:
    """One connection's worth of requests."""

    number = 0

    def __init__(self, url: str) -> None:
        self._http = Http(url, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """A request; anything but success ends the benchmark."""
        Client.number += 1
        headers = {"Idempotency-Key": f"bench-{Client.number}"} if method == "POST" else {}
        answer = await self._http.request(method, f"{BASE}/{path}", {}, headers, b"" if body is None else json.dumps(body).encode())
        assert answer.status < 300, answer
        return answer

    async def create(self) -> str:
        """A sandbox, from the call to its first command's output."""
        made = json.loads((await self.ask("POST", "sandboxes", {"metadata": {"generateName": "b-"}, "spec": SPEC})).body)["metadata"][
            "name"
        ]
        await self.run(made, "echo", "x")
        return str(made)

    async def run(self, box: str, *command: str) -> None:
        """A command, to its end."""
        made = json.loads((await self.ask("POST", f"sandboxes/{box}/processes", {"spec": {"command": command}})).body)
        await self.ask("GET", f"processes/{made['metadata']['name']}/output?wait=30s")


async def timed(work: Awaitable[Any], times: list[float]) -> Any:
    began = time.perf_counter()
    result = await work
    times.append((time.perf_counter() - began) * 1000)
    return result


def row(what: str, times: list[float]) -> None:
    times.sort()
    print(f"{what:44} p50 {times[len(times) // 2]:8.1f} ms   p99 {times[min(len(times) - 1, int(len(times) * 0.99))]:8.1f} ms", flush=True)


async def one_at_a_time(url: str, count: int) -> None:
    client, creations, commands = Client(url), [], []
    for _ in range(count):
        box = await timed(client.create(), creations)
        for _ in range(5):
            await timed(client.run(box, "true"), commands)
        await client.ask("DELETE", f"sandboxes/{box}")
    row("create to first output, one at a time", creations)
    row("exec of true, one at a time", commands)


async def at_once(url: str, count: int) -> None:
    clients, times = [Client(url) for _ in range(count)], []
    boxes = await asyncio.gather(*(timed(client.create(), times) for client in clients))
    row(f"create to first output, {count} at once", times)
    began = time.perf_counter()
    await asyncio.gather(*(client.ask("DELETE", f"sandboxes/{box}") for client, box in zip(clients, boxes, strict=True)))
    print(f"{f'{count} torn down':44} {time.perf_counter() - began:12.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100, help="sandboxes one after the other")
    parser.add_argument("--burst", type=int, default=500, help="sandboxes at once")
    asked = parser.parse_args()
    parts: list[Callable[[str], Awaitable[None]]] = [
        lambda url: one_at_a_time(url, asked.count),
        lambda url: at_once(url, min(50, asked.burst)),
        lambda url: at_once(url, asked.burst),
    ]
    with serving() as url:
        for part in parts:
            asyncio.run(part(url))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
