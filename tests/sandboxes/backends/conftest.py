"""Backends with their servers on loopback, faults included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from e2b_fleet import KEY, Fleet
from loopback import serving
from places import GUESTS, Place, environment, place

collect_ignore = [] if "gvisor" in GUESTS else ["test_backends_gvisor.py"]
NO_SETTINGS = ("SANDMILL_BACKEND", "SANDMILL_API_URL", "E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "KUBECONFIG")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said by the environment but by the test."""
    for name in NO_SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=GUESTS)
def guests(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each backend whose agent is a guest."""
    with place(request.param, tmp_path) as here:
        yield here
        assert here.left() == []


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """An E2B fleet, and the environment that leads to it."""
    running = Fleet()
    with serving(running.app()) as url, environment({"E2B_API_KEY": KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}):
        yield running


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster, and the environment that leads to it."""
    running = Cluster()
    with serving(running.app()) as url, environment({"KUBECONFIG": str(running.config(tmp_path, url))}):
        yield running
