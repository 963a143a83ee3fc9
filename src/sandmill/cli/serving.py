"""`sandmill serve` and `sandmill key`. In: the command line. Out: a running server; keys, printed once.

A server without any key makes one for its owner at its first start, as long as only this machine can reach it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

from sandmill.errors import ConfigError
from sandmill.reports.inert import inert

KEY_VARIABLE: Final = "SANDMILL_API_KEY"


def default_folder() -> Path:
    """Where a server keeps its state unless told otherwise: beside that of sandboxes."""
    from sandmill.sandboxes.backends.native.state import state_root

    return state_root() / "server"


def serve(*, host: str, port: int, folder: Path | None, database: str | None, prices: Path | None, max_running: int, as_json: bool) -> int:
    """Runs until it is told to stop."""
    _need_packages()
    from sandmill.accounts.prices import load_price_book
    from sandmill.server.keys import Keys
    from sandmill.server.serve import check_address
    from sandmill.server.serve import serve as run
    from sandmill.server.settings import Settings

    where = (folder or default_folder()).absolute()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = Settings(
        folder=where, prices=load_price_book(prices), host=host, port=port, database=database or None, max_running=max_running
    )
    keys = Keys(where)
    key = os.environ.get(KEY_VARIABLE)
    if key:
        keys.add(key, "environment")
    check_address(host, keys)
    if not keys:
        key = keys.make("owner")

    def announce(url: str) -> None:
        _announce(url, key, where, as_json=as_json)

    run(settings, keys, announce)
    return 0


def new_key(name: str, projects: tuple[str, ...], folder: Path | None, *, as_json: bool) -> int:
    """Makes a key and prints it, once."""
    _need_packages()
    from sandmill.server.keys import Keys

    where = (folder or default_folder()).absolute()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = Keys(where).make(name, projects)
    print(json.dumps({"name": name, "projects": list(projects), "key": key}) if as_json else key)
    if not as_json:
        print("a running server takes it after its next start; it is shown only this once", file=sys.stderr)
    return 0


def _announce(url: str, key: str | None, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": url, "key": key, "state": str(folder)}), flush=True)
        return
    shown = key if key is not None else "the key that was shown when it was made (another: sandmill key new NAME)"
    print(f"sandmill serves {url}, state in {inert(str(folder))}; stop it with Ctrl-C")
    print(f"export NODUS_API_URL={url}")
    print(f"export NODUS_API_KEY={shown}", flush=True)


def _need_packages() -> None:
    try:
        import cryptography  # noqa: F401
        import sqlalchemy  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server's packages are not installed ({error.name} is missing); run: pip install 'sandmill[server]'"
        ) from error
