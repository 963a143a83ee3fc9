"""The bodies of `sandmill node ...`. In: options. Out: a running node; a server's nodes, listed, drained, removed."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from sandmill.cli.serving import KEY_VARIABLE, default_folder, need_packages
from sandmill.cli.told import tell
from sandmill.errors import ConfigError
from sandmill.reports.inert import inert

if TYPE_CHECKING:
    from sandmill.server.head import Head

_SERVER: Final = "http://127.0.0.1:8420"
_LOOK_S: Final = 0.5
_DRAIN_MARGIN_S: Final = 180.0
_LARGEST_KEY_FILE: Final = 4096
T = TypeVar("T")


class Asked(NamedTuple):
    """The options of `sandmill node join`."""

    url: str
    name: str | None
    host: str
    port: int
    advertise: str | None
    most: int
    labels: tuple[str, ...]
    key_file: Path | None
    folder: Path | None
    certificate: Path | None
    certificate_key: Path | None


def join(asked: Asked, *, as_json: bool) -> int:
    """Runs until it is told to stop, or its server no longer wants it."""
    need_packages()
    from sandmill.accounts.prices import PriceBook
    from sandmill.cli.serving import check_certificate, server_folder
    from sandmill.server.head import Head
    from sandmill.server.keys import Keys
    from sandmill.server.membership import Joining
    from sandmill.server.serve import serve
    from sandmill.server.settings import Settings

    name, key = _name(asked.name), _key(asked.key_file)
    Head(asked.url, key)  # says at once when the address is none
    _check_address(asked)
    check_certificate(asked.certificate, asked.certificate_key)
    joining = Joining(head=asked.url, key=key, name=name, url=asked.advertise, most=asked.most, labels=_labels(asked.labels))
    folder = server_folder(asked.folder or default_folder().with_name("node"))
    settings = Settings(
        folder=folder,
        prices=PriceBook(),
        host=asked.host,
        port=asked.port,
        certificate=asked.certificate,
        certificate_key=asked.certificate_key,
        max_running=asked.most,
        local_sandboxes=asked.most,
        max_objects=max(20_000, 2 * asked.most),
    )

    def announce(url: str) -> None:
        if as_json:
            print(json.dumps({"node": name, "url": url, "server": asked.url, "state": str(folder)}), flush=True)
        else:
            print(f"node {name} of {inert(asked.url)}, at {url}; stop it with Ctrl-C", flush=True)

    keys = Keys(folder)
    if keys:
        raise ConfigError(f"{inert(str(folder))} is a server's state folder; choose another with --state", field="--state")
    serve(settings, keys, announce, joining)
    return 0


def list_nodes(server: str | None, key_file: Path | None, *, as_json: bool) -> int:
    """Prints the nodes, one a line."""
    found = _ask(_head(server, key_file).nodes())
    if as_json:
        print(json.dumps(found))
        return 0
    rows = [("NAME", "PHASE", "SANDBOXES", "LOAD", "CPU", "FREE MEMORY", "URL"), *(_row(value) for value in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def drain(name: str, deadline: str, server: str | None, key_file: Path | None, *, wait: bool, as_json: bool) -> int:
    """Asks for a drain; with `wait`, until it is done."""
    from sandmill.config.quantities import parse_duration

    ends = time.monotonic() + parse_duration(deadline, field="--deadline") + _DRAIN_MARGIN_S
    head = _head(server, key_file)
    value = _ask(head.set(name, {"state": "Draining", "drainTimeout": deadline}))
    while wait and value["status"]["sandboxes"] and time.monotonic() < ends:
        time.sleep(_LOOK_S)
        value = _ask(head.node(name))
    held = value["status"]["sandboxes"]
    phase = value["status"]["phase"]
    tell(f"node {inert(name)} is {phase} and holds {held} sandboxes", as_json=as_json, node=name, phase=phase, sandboxes=held)
    if wait and held:
        print("it was not empty in time; see `sandmill node ls`", file=sys.stderr)
        return 4
    return 0


def resume(name: str, server: str | None, key_file: Path | None, *, as_json: bool) -> int:
    """Ends a drain."""
    value = _ask(_head(server, key_file).set(name, {"state": "Ready"}))
    phase = value["status"]["phase"]
    tell(f"node {inert(name)} is {phase}", as_json=as_json, node=name, phase=phase)
    return 0


def remove(name: str, server: str | None, key_file: Path | None, *, as_json: bool) -> int:
    """Forgets a node."""
    _ask(_head(server, key_file).remove(name))
    tell(f"node {inert(name)} is removed", as_json=as_json, removed=name)
    return 0


def _row(value: dict[str, Any]) -> tuple[str, ...]:
    status = value["status"]
    cells = (
        value["metadata"]["name"],
        status["phase"],
        status["sandboxes"],
        status.get("load", ""),
        status.get("capacity", {}).get("cpu", ""),
        status.get("free", {}).get("memory", ""),
        status.get("url", ""),
    )
    return tuple(inert(str(cell), limit=120) for cell in cells)


def _head(server: str | None, key_file: Path | None) -> Head:
    need_packages()
    from sandmill.server.head import Head

    return Head(server or os.environ.get("SANDMILL_API_URL") or _SERVER, _key(key_file))


def _ask(work: Coroutine[Any, Any, T]) -> T:
    from sandmill.sandboxes import loop

    return asyncio.run_coroutine_threadsafe(work, loop()).result()


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get(KEY_VARIABLE, "")
    try:
        with file.open("rb") as opened:
            return opened.read(_LARGEST_KEY_FILE).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the key cannot be read from {inert(str(file))}: {said}", field="--key-file") from error


def _name(named: str | None) -> str:
    from sandmill.server.specs import NAME

    name = named or re.sub(r"[^a-z0-9]+", "-", socket.gethostname().partition(".")[0].lower())[:63].strip("-") or "node"
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"{name!a} is no node's name: at most 63 lower-case letters, digits and '-'", field="--name")
    return name


def _labels(words: tuple[str, ...]) -> dict[str, str]:
    from sandmill.server.schema import Causes
    from sandmill.server.specs import METADATA

    labels = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!a} is no label; write KEY=VALUE", field="--label")
        labels[key] = value
    causes = Causes()
    METADATA.check({"labels": labels}, "", causes)
    if causes.found:
        raise ConfigError(causes.found[0].message, field="--label")
    return labels


def _check_address(asked: Asked) -> None:
    """A server on another machine does not find a node that listens on loopback."""
    if _is_loopback(asked.host) and asked.advertise is None and not _is_loopback(urlsplit(asked.url).hostname or ""):
        raise ConfigError(
            "the server is on another machine and could not reach this node at a loopback address; listen elsewhere with --host ADDRESS, "
            "or say with --advertise URL where the server finds it",
            field="--host",
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
