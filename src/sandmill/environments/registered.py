"""Environments under names of one's own. In: `name@version`, a reference and its options. Out: a record of what that was then.

    <state>/envs/names/<name>@<version>.json

A version means one content for ever: when its package, its files or its options come to something else, it is refused, not used.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from sandmill.config.manifest import EnvironmentSection, Option
from sandmill.environments import foreign
from sandmill.environments.access.access import NOTHING, Access
from sandmill.environments.foreign import ForeignEnvironment
from sandmill.environments.formats import FORMATS, MACHINES, plan
from sandmill.environments.packages.install import Report
from sandmill.errors import ConfigError, EnvironmentFailed
from sandmill.sandboxes.backends.native import state
from sandmill.sandboxes.dual import block_on

_NAME: Final = re.compile(r"([a-z0-9][a-z0-9._-]{0,79})@([0-9A-Za-z][0-9A-Za-z.+-]{0,39})")


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """One environment under a name."""

    name: str
    version: str
    reference: str
    options: Mapping[str, Option] = {}
    digest: str
    """sha256 of what is installed and how it is loaded; not of how many tasks are drawn from it."""
    splits: Mapping[str, int | None] = {}
    licence: str = ""
    reward: str = ""
    added_s: float = 0.0
    """Seconds since 1970."""
    format_version: int = 1


def register(text: str, environment: ForeignEnvironment, section: EnvironmentSection) -> Registered:
    """Gives a loaded environment the name `name@version`. Raises ConfigError for what is no name, or means another content already."""
    match = _NAME.fullmatch(text)
    if match is None or match[1] in (*FORMATS, *MACHINES, "shell"):
        raise ConfigError(f"{text[:100]!a} is no name to give; write it as sums@1.0.0, in small letters, digits and . _ -", field="--as")
    own = environment.description
    entry = Registered(
        name=match[1],
        version=match[2],
        reference=section.name,
        options=section.options,
        digest=_content(section.name, section.options, environment),
        splits=own.splits,
        licence=own.licence,
        reward=own.reward,
        added_s=time.time(),
    )
    known = find(text)
    if known is not None and known.digest != entry.digest:
        raise ConfigError(f"{text} is something else already; a version never changes, so add it as another", field="--as")
    place = _folder() / f"{text}.json"
    fresh = place.with_name(f".{secrets.token_hex(8)}")
    fresh.write_bytes(msgspec.json.encode(entry))
    fresh.rename(place)
    return entry


def find(text: str) -> Registered | None:
    """What `name@version` was added as."""
    if _NAME.fullmatch(text) is None:
        return None
    try:
        return msgspec.json.decode((_folder() / f"{text}.json").read_bytes(), type=Registered)
    except (OSError, msgspec.MsgspecError):
        return None


def registered() -> list[Registered]:
    """All of them, by name."""
    found = (find(path.name.removesuffix(".json")) for path in sorted(_folder().glob("*@*.json")))
    return [one for one in found if one is not None]


def forget(text: str) -> bool:
    """Takes a name back. Whether there was one."""
    if find(text) is None:
        return False
    (_folder() / f"{text}.json").unlink(missing_ok=True)
    return True


def load(
    entry: Registered, section: EnvironmentSection, report: Report = lambda line: None, *, fit: bool = False, access: Access = NOTHING
) -> ForeignEnvironment:
    """The environment as it was added. Raises ConfigError for options, which are part of it, EnvironmentFailed."""
    text = f"{entry.name}@{entry.version}"
    if section.options:
        raise ConfigError(
            f"the options of {text} belong to its version; add it with others under another", field="spec.environment.options"
        )
    inner = msgspec.structs.replace(section, name=entry.reference, options=entry.options)
    environment = foreign.load(entry.reference, inner, report, fit=fit, access=access)
    if _content(entry.reference, entry.options, environment) != entry.digest:
        block_on(environment.close())
        raise EnvironmentFailed(f"{text} is no longer what was added: {entry.reference} has changed; add it under another version")
    environment.name, environment.version = entry.name, entry.version
    return environment


def _content(reference: str, options: Mapping[str, Option], environment: ForeignEnvironment) -> str:
    made = plan(reference, EnvironmentSection(name=reference, options=options))
    whole = hashlib.sha256(f"{made.name}\0{made.version}\0{environment.installed.record.digest}\0".encode())
    whole.update(msgspec.json.encode([made.load, made.common], order="deterministic"))
    return f"sha256:{whole.hexdigest()}"


def _folder() -> Path:
    folder = state.state_root() / "envs" / "names"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder
