"""A real PostgreSQL for tests, run as a user of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path


class Postgres:
    """A PostgreSQL of our own, on a socket in a folder of our own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = (folder / "log").open("wb")
        user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._as_user = ["setpriv", f"--reuid={user}", "--clear-groups"] if os.geteuid() == 0 else []
        self.where = Path("/tmp") / f"sandmill-{name}-{os.getpid()}"  # a socket's path may have 107 bytes
        self.where.mkdir(mode=0o700)
        if os.geteuid() == 0:
            shutil.chown(self.where, user)
        make = [*self._as_user, program("initdb"), "-D", str(self.where / "data"), "-U", "sandmill", "-A", "trust", "-N"]
        subprocess.run(make, check=True, stdout=self._log, stderr=self._log, cwd="/")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://sandmill@/postgres?host={self.where}"

    def start(self) -> None:
        serve = [
            program("postgres"),
            "-D",
            str(self.where / "data"),
            "-k",
            str(self.where),
            "-c",
            "listen_addresses=",
            "-c",
            "max_connections=20",
        ]
        self._process = subprocess.Popen([*self._as_user, *serve], stdout=self._log, stderr=self._log, cwd="/")
        deadline = time.monotonic() + 30
        while not (self.where / ".s.PGSQL.5432").exists():
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # a fast shutdown: clients are cut off
        self._process.wait(30)

    def close(self) -> None:
        self.stop()
        self._log.close()
        shutil.rmtree(self.where, ignore_errors=True)


def program(name: str) -> str:
    """A program of PostgreSQL, which distributions keep off the path."""
    found = shutil.which(name) or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)), None)
    assert found is not None, f"no {name}: install postgresql"
    return found
