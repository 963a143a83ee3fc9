"""Sandboxes for tests: always ended, and at the end of the session nothing of them may be left."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandmill.sandboxes import Sandbox, list_sandboxes

Maker = Callable[..., Sandbox]


@pytest.fixture
def make() -> Iterator[Maker]:
    """Creates small sandboxes that end with the test."""
    made: list[Sandbox] = []

    def create(**options: object) -> Sandbox:
        sandbox = Sandbox.create(**{"memory": "256Mi", "disk": "32Mi"} | options)  # type: ignore[arg-type]
        made.append(sandbox)
        return sandbox

    yield create
    for sandbox in made:
        sandbox.terminate()


@pytest.fixture
def box(make: Maker) -> Sandbox:
    return make()


@pytest.fixture(scope="session", autouse=True)
def nothing_leaks() -> Iterator[None]:
    """At the end, this process has no sandbox, no process in a pid namespace below its own, and no control group of a sandbox."""
    yield
    deadline = time.monotonic() + 2  # a cancelled creation is undone in the background
    while nested_descendants() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [record for record in list_sandboxes() if record.owner_pid == os.getpid()] == []
    assert nested_descendants() == []
    deadline = time.monotonic() + 5  # an empty one waits a moment for the next sandbox
    while groups := [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if re.search(rf"/sandmill-{os.getpid()}-[^/]*/\d+$", folder)]:
        assert time.monotonic() < deadline, groups
        time.sleep(0.1)


def nested_descendants() -> list[int]:
    """Pids of this machine that live in a nested pid namespace and descend from this test process."""
    parents: dict[int, int] = {}
    nested = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            lines = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        parents[int(place.name)] = int(lines["PPid"])
        if len(lines["NSpid"].split()) > 1:
            nested.append(int(place.name))
    return [pid for pid in nested if descends(pid, parents)]


def descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False
