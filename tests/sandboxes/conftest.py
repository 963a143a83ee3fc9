"""Sandboxes for tests: always ended, and at the end of the session nothing of them may be left."""

from __future__ import annotations

import os
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
    yield
    mine = [record for record in list_sandboxes() if record.owner_pid == os.getpid()]
    assert mine == []
    assert children_in_namespaces() == []


def children_in_namespaces() -> list[int]:
    """Processes of this machine that live in a pid namespace below ours and descend from this test process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            environment = (status.parent / "environ").read_bytes()
        except OSError:
            continue
        nested = next((line for line in text.splitlines() if line.startswith("NSpid:")), "")
        if len(nested.split()) > 2 and f"SANDMILL_TEST_OWNER={os.getpid()}".encode() in environment:
            found.append(int(status.parent.name))
    return found
