"""Sandboxes with a network, besides those that every test of sandboxes has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from boxes import box, make, nothing_leaks
from internet import EVIL, GOOD, OTHER, Boxes, Internet, internet

from sandmill.sandboxes import Egress, Sandbox, SandboxSpec

__all__ = ["box", "make", "nothing_leaks"]


@pytest.fixture
def world() -> Iterator[Internet]:
    with internet() as world:
        world.names = {
            "pypi.example.org": [[GOOD]],
            "a.files.example.org": [[OTHER]],
            "b.c.files.example.org": [[OTHER]],
            "xn--bcher-kva.example.org": [[GOOD]],
            "evil.example.org": [[EVIL]],
        }
        yield world


@pytest.fixture
def boxes(world: Internet) -> Iterator[Boxes]:
    made: list[Sandbox] = []

    def make(network: Egress) -> Sandbox:
        made.append(Sandbox.from_spec(SandboxSpec.of(memory="256Mi", disk="32Mi", network=network), outside=world))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.terminate()
