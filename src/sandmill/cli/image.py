"""`sandmill image build|import|ls|show|rm|prune`: a command line in; changes of the image store, and what it holds, out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sandmill.cli.told import tell
from sandmill.config.quantities import parse_bytes
from sandmill.errors import ConfigError
from sandmill.reports.inert import inert
from sandmill.reports.words import duration, size
from sandmill.sandboxes import Egress, Image, Stored
from sandmill.sandboxes.images import store

_NETWORKS = {"none": Egress.deny(), "open": Egress.open()}
_DIGITS = 12


class Wanted(NamedTuple):
    """What to build."""

    context: Path
    file: Path
    name: str | None
    build_args: tuple[str, ...]
    memory: str
    disk: str
    network: str


def build(wanted: Wanted, *, as_json: bool) -> int:
    """Builds an image, a line per step on stderr, and prints its digest. Raises ConfigError, SandboxError."""
    if wanted.network not in _NETWORKS:
        raise ConfigError(f"it is none or open, not {wanted.network!r}", field="--network")
    arguments = dict(_pair(text) for text in wanted.build_args)
    image = Image.build(
        wanted.file,
        wanted.context,
        name=wanted.name,
        build_args=arguments,
        memory=wanted.memory,
        disk=wanted.disk,
        network=_NETWORKS[wanted.network],
        report=lambda line: print(inert(line, limit=200), file=sys.stderr, flush=True),
    )
    return _print_made(image, as_json=as_json)


def load(reference: str, name: str | None, *, as_json: bool) -> int:
    """Imports an archive and prints the image's digest. Raises ImageError."""
    return _print_made(Image.load(reference, name=name), as_json=as_json)


def list_images(*, as_json: bool) -> int:
    """Prints the store's images."""
    found = list(reversed(store().list()))
    if as_json:
        sys.stdout.write(json.dumps([_as_json(one) for one in found], ensure_ascii=True) + "\n")
        return 0
    rows = [("image", "digest", "layers", "size", "used", "")]
    for one in found:
        names = inert(", ".join(one.names), limit=120) or "-"
        state = "in use" if one.in_use else "kept" if one.kept else ""
        ago = f"{duration(max(0.0, time.time() - one.used_at))} ago"
        rows.append((names, one.digest.removeprefix("sha256:")[:_DIGITS], str(len(one.image.layers)), size(one.bytes), ago, state))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    return 0


def show(name: str) -> int:
    """Prints one image as JSON. Raises ImageError."""
    digest = store().find(name).digest
    stored = next(one for one in store().list() if one.digest == digest)
    sys.stdout.write(json.dumps(_as_json(stored), ensure_ascii=True, indent=2) + "\n")
    return 0


def remove(names: Sequence[str], *, as_json: bool) -> int:
    """Removes each. Raises ImageError for the first that cannot be."""
    for name in names:
        store().remove(name)
        tell(f"removed {inert(name, limit=200)}", as_json=as_json, removed=name)
    return 0


def prune(keep: str, *, as_json: bool) -> int:
    """Removes what is not used, and says how much room that made."""
    limit_bytes = 0 if keep == "0" else parse_bytes(keep, field="--keep")
    freed, left = store().prune(limit_bytes), store().total_bytes()
    tell(f"freed {size(freed)}; {size(left)} are left", as_json=as_json, freed_bytes=freed, left_bytes=left)
    return 0


def _print_made(image: Image, *, as_json: bool) -> int:
    sys.stdout.write((json.dumps({"digest": image.digest, "layers": len(image.layers)}) if as_json else image.digest) + "\n")
    return 0


def _as_json(stored: Stored) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(stored)
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"it is NAME=VALUE, not {text!r}", field="--build-arg")
    return name, value
