"""Stores for tests: a fresh one where no sandbox is needed, else the machine's, which keeps nothing of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandmill.sandboxes import Sandbox
from sandmill.sandboxes.images import Store, store


@pytest.fixture
def place(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def shared() -> Iterator[Store]:
    """The store that sandboxes of this process start from; images that a test added are removed."""
    before = {one.digest for one in store().list()}
    yield store()
    for one in store().list():
        if one.digest not in before:
            store().remove(one.digest)
    store().collect()


@pytest.fixture
def make(shared: Store, make: Callable[..., Sandbox]) -> Callable[..., Sandbox]:
    """The same `make` as elsewhere, whose sandboxes end before their images are removed."""
    return make
