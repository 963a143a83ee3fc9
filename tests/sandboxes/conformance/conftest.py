"""The same tests at every backend that can run here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandmill.sandboxes import Sandbox

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
from places import BACKENDS, Maker, Place, place


@pytest.fixture(scope="module", params=BACKENDS)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One backend. At the end nothing is left there."""
    with place(request.param, tmp_path_factory.mktemp(request.param)) as here:
        yield here
        assert here.left() == []


@pytest.fixture(scope="module")
def shared(where: Place) -> Iterator[Sandbox]:
    """A sandbox that the tests of a module share."""
    box = where.create(env={"GREETING": "hello"}, files={"given/a": b"a\n"})
    yield box
    box.terminate()


@pytest.fixture
def box(shared: Sandbox) -> Iterator[Sandbox]:
    """The shared one, empty of processes afterwards."""
    yield shared
    assert shared.alive, shared.gone_reason
    shared.kill_processes()


@pytest.fixture
def make(where: Place) -> Iterator[Maker]:
    """Sandboxes of a test's own."""
    made: list[Sandbox] = []

    def create(**options: object) -> Sandbox:
        made.append(where.create(**options))
        return made[-1]

    yield create
    for box in made:
        box.terminate()
