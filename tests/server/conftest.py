"""Servers for tests: one that most tests share, and a real PostgreSQL."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_process import Postgres
from server_process import KEY, Server, serving

collect_ignore = [] if shutil.which("runsc") else ["test_server_guests.py"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SQLite, list prices."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def clean(server: Server) -> Iterator[Server]:
    """The shared server; what the test leaves there is removed."""
    yield server
    for plural in ("sandboxes", "images", "environments", "secrets"):
        assert server.ask("DELETE", plural).status == 200


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL for all tests."""
    running = Postgres(tmp_path_factory.mktemp("postgres"), "pg")
    try:
        yield running.url
    finally:
        running.close()


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[Postgres]:
    """A PostgreSQL for one test, which may stop it."""
    running = Postgres(tmp_path, "own")
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(params=["here", "server"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where sandboxes are made; nothing else differs."""
    monkeypatch.delenv("SANDMILL_API_URL", raising=False)
    if request.param == "server":
        monkeypatch.setenv("SANDMILL_API_URL", request.getfixturevalue("server").url)
        monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    return str(request.param)
