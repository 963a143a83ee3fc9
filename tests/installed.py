"""Packages that tests install: where pip finds them, and that they are gone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandmill.environments.packages.install import records, remove


@contextlib.contextmanager
def removed_after() -> Iterator[None]:
    """What is installed within is removed at its end."""
    before = set(records())
    try:
        yield
    finally:
        for key in set(records()) - before:
            remove(key)


@pytest.fixture
def clean() -> Iterator[None]:
    """What a test installs is removed after it."""
    with removed_after():
        yield


@contextlib.contextmanager
def only_index(folder: Path) -> Iterator[None]:
    """pip looks for wheels in `folder`, and nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
            patch.delenv(name, raising=False)
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        yield
