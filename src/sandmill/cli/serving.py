"""`sandmill serve` and `sandmill key`. In: the command line. Out: a running server; keys, printed once.

A server without any key makes one for its owner at its first start, as long as only this machine can reach it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from sandmill.cli.told import tell
from sandmill.errors import ConfigError
from sandmill.reports.inert import inert

if TYPE_CHECKING:
    from sandmill.server.settings import Settings

KEY_VARIABLE: Final = "SANDMILL_API_KEY"


def default_folder() -> Path:
    """Where a server keeps its state unless told otherwise: beside that of sandboxes."""
    from sandmill.sandboxes.backends.native.state import state_root

    return state_root() / "server"


class Asked(NamedTuple):
    """The options of `sandmill serve`."""

    host: str
    port: int
    folder: Path | None
    database: str | None
    prices: Path | None
    certificate: Path | None
    certificate_key: Path | None
    max_running: int
    max_local: int
    node_lease_s: float
    longest_wait_s: float


def serve(asked: Asked, *, as_json: bool) -> int:
    """Runs until it is told to stop."""
    need_packages()
    from sandmill.server.keys import Keys
    from sandmill.server.serve import check_address
    from sandmill.server.serve import serve as run

    settings = _settings(asked)
    keys = Keys(settings.folder)
    key = os.environ.get(KEY_VARIABLE)
    if key:
        keys.give(key, "environment")
    check_address(settings.host, keys)

    def announce(url: str) -> None:
        # Not before it is up: a key that is made and never shown would leave its owner without one.
        made = None if keys else keys.make("owner")
        _announce(url, made, bool(key), settings.folder, as_json=as_json)

    run(settings, keys, announce)
    return 0


def _settings(asked: Asked) -> Settings:
    from sandmill.accounts.prices import load_price_book
    from sandmill.server.settings import Settings

    check_certificate(asked.certificate, asked.certificate_key)
    return Settings(
        folder=server_folder(asked.folder),
        prices=load_price_book(asked.prices),
        host=asked.host,
        port=asked.port,
        database=asked.database or None,
        certificate=asked.certificate,
        certificate_key=asked.certificate_key,
        max_running=asked.max_running,
        local_sandboxes=asked.max_local,
        node_lease_s=asked.node_lease_s,
        longest_wait_s=asked.longest_wait_s,
    )


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises ConfigError unless both are files, or neither is given."""
    if (certificate is None) is not (key is None):
        raise ConfigError("TLS needs both a certificate and its key", field="--tls-cert")
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if path is not None and not path.is_file():
            raise ConfigError(f"there is no file {inert(str(path))}", field=option)


def server_folder(named: Path | None) -> Path:
    """A server's state folder, made if need be. Raises ConfigError."""
    where = (named or default_folder()).absolute()
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the state folder {inert(str(where))} cannot be made: {error.strerror}", field="--state") from error
    return where


def new_key(name: str, projects: tuple[str, ...], role: str, folder: Path | None, *, as_json: bool) -> int:
    """Makes a key and prints it, once."""
    need_packages()
    from sandmill.server.keys import ROLES, Keys

    if role not in ROLES:
        raise ConfigError(f"{role!a} is no role of a key; one is {' or '.join(ROLES)}", field="--role")
    key = Keys(server_folder(folder)).make(name, projects, role)
    print(json.dumps({"name": name, "projects": list(projects), "role": role, "key": key}) if as_json else key)
    if not as_json:
        print("it is shown only this once", file=sys.stderr)
    return 0


def list_keys(folder: Path | None, *, as_json: bool) -> int:
    """Names the keys and their projects."""
    need_packages()
    from sandmill.server.keys import Keys

    found = Keys(server_folder(folder)).all()
    if as_json:
        print(json.dumps([{"name": one.name, "projects": list(one.projects), "role": one.role} for one in found]))
        return 0
    for one in found:
        print(f"{inert(one.name)}\t{_reach(one.role, one.projects)}")
    return 0


def _reach(role: str, projects: tuple[str, ...]) -> str:
    return f"as a {role}" if role != "user" else ", ".join(projects) or "all projects"


def remove_key(name: str, folder: Path | None, *, as_json: bool) -> int:
    """Ends a key, at once."""
    need_packages()
    from sandmill.server.keys import Keys

    Keys(server_folder(folder)).remove(name)
    tell(f"the key {inert(name)} has ended", as_json=as_json, removed=name)
    return 0


def _announce(url: str, made: str | None, given: bool, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": url, "key": made, "state": str(folder)}), flush=True)
        return
    shown = made or (f"${KEY_VARIABLE}" if given else "...  # the key that was shown when it was made; another: sandmill key new NAME")
    print(f"sandmill serves {url}, state in {inert(str(folder))}; stop it with Ctrl-C")
    for names in ("NODUS", "SANDMILL"):
        print(f"export {names}_API_URL={url}")
        print(f"export {names}_API_KEY={shown}", flush=True)


def need_packages() -> None:
    """Raises ConfigError when what a server needs is not installed."""
    try:
        import cryptography  # noqa: F401
        import sqlalchemy  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server's packages are not installed ({error.name} is missing); run: pip install 'sandmill[server]'"
        ) from error
