"""Servers for tests: one that most tests share, and a real PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SQLite, list prices."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def clean(server: Server) -> Iterator[Server]:
    """The shared server; what the test leaves there is removed."""
    yield server
    for plural in ("sandboxes", "secrets"):
        assert server.ask("DELETE", plural).status == 200


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL of our own, on a socket in a folder of our own."""
    folder = tmp_path_factory.mktemp("postgres")
    user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    where = Path("/tmp") / f"sandmill-pg-{os.getpid()}"
    where.mkdir(mode=0o700)
    if os.geteuid() == 0:
        shutil.chown(where, user)
    as_user = ["setpriv", f"--reuid={user}", "--clear-groups"] if os.geteuid() == 0 else []
    with (folder / "log").open("wb") as log:
        make = [*as_user, program("initdb"), "-D", str(where / "data"), "-U", "sandmill", "-A", "trust", "-N"]
        subprocess.run(make, check=True, stdout=log, stderr=log, cwd="/")
        serve = [
            *as_user,
            program("postgres"),
            "-D",
            str(where / "data"),
            "-k",
            str(where),
            "-c",
            "listen_addresses=",
            "-c",
            "max_connections=20",
        ]
        process = subprocess.Popen(serve, stdout=log, stderr=log, cwd="/")
    try:
        deadline = time.monotonic() + 30
        while not (where / ".s.PGSQL.5432").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield f"postgresql://sandmill@/postgres?host={where}"
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(where, ignore_errors=True)


def program(name: str) -> str:
    """A program of PostgreSQL, which distributions keep off the path."""
    found = shutil.which(name) or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None)
    assert found is not None, f"no {name}: install postgresql"
    return found
