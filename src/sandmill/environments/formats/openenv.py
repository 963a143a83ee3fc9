"""`openenv/PATH[@VERSION]`: a project made by `openenv init`, served in the sandbox. `openenv/ws://HOST:PORT`: a server of one's own.

`openenv/PROJECT@VERSION` is a published project, with `app`. VERSION beside a path is that of openenv; without it, the project decides.
What its reset is given, a seed or a task's number, is the task; other options go to the reset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
import yaml

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import FIELD, CommonOptions, Plan, Reference, adapter, parse_options
from sandmill.environments.packages.package import FILES, Copied
from sandmill.errors import ConfigError, UnknownEnvironment

MANIFEST: Final = "openenv.yaml"
_APP: Final = "server.app:app"
_SPREAD: Final = 1_000_003
_FIRST: Final = 1 << 30
HELD_OUT_OFFSET: Final = 1 << 29
"""Added to the seed for the held-out split; seeds stay below 2**31."""
EPISODES: Final = 16
"""That one sandbox plays at once: each has a server with threads of its own."""


class OpenEnvOptions(CommonOptions, frozen=True, kw_only=True, rename="camel"):
    """Options of an OpenEnv environment."""

    act: Literal["auto", "text", "tool"] = "auto"
    """How the model acts: by its reply, where an action is one text, or by the tool `step`."""
    instructions: str = ""
    """What the model is told before the first observation, which seldom says how to act."""
    unfinished: float = 0.0
    """The reward of an episode that was cut short before any step gave one."""
    step_errors: Literal["action", "server"] = "action"
    """Whose fault it is when the environment raises in a step: environments refuse invalid actions so, and the wire does not say why."""
    app: str = ""
    """`module:object`, where openenv.yaml does not say it."""
    sessions: int = 0
    """Episodes at once; for a server of one's own its max_concurrent_envs, 1 unless said."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of an openenv.yaml."""

    name: str
    app: str = _APP
    version: str | float = ""


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    common, arguments = parse_options(OpenEnvOptions, section.options, others=True)
    if "://" in reference.what:
        return _remote(reference, section, common, arguments)
    path = Path(reference.what).expanduser()
    if not path.exists() and reference.version and "/" not in reference.what:
        if not common.app:
            raise ConfigError("is needed for a published project: module:object of its server", field=f"{FIELD}.app")
        package = common.package([f"{reference.what}=={reference.version}"])
        return _plan(reference, section, common, arguments, Manifest(name=reference.what, app=common.app), package=package)
    manifest = read_manifest(path)
    copied = Copied(source=str(path), place="server")
    local = (str(path),) if (path / "pyproject.toml").is_file() else ()
    package = common.package([f"openenv=={reference.version}"] if reference.version else [], files=(copied,), also_local=local)
    return _plan(reference, section, common, arguments, manifest, package=package, folder=f"{FILES}/server")


def _plan(
    reference: Reference,
    section: EnvironmentSection,
    common: OpenEnvOptions,
    arguments: dict[str, Any],
    manifest: Manifest,
    *,
    folder: str = "",
    **more: Any,
) -> Plan:
    seed = section.seed * _SPREAD % _FIRST
    return Plan(
        reference=reference.text,
        name=f"openenv/{manifest.name}",
        version=str(manifest.version) or reference.version,
        adapter=adapter("openenv"),
        load={
            "name": manifest.name,
            "folder": folder,
            "app": common.app or manifest.app,
            "arguments": arguments,
            "act": common.act,
            "step_errors": common.step_errors,
            "instructions": common.instructions,
            "unfinished": common.unfinished,
            "sessions": common.sessions or (1 if "remote" in more else EPISODES),
            "seeds": {"train": seed, "heldout": seed + HELD_OUT_OFFSET},
        },
        common=common,
        source=reference.text,
        **more,
    )


def _remote(reference: Reference, section: EnvironmentSection, common: OpenEnvOptions, arguments: dict[str, Any]) -> Plan:
    parts = urlsplit(reference.what)
    if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.query or reference.version:
        raise UnknownEnvironment(f"{reference.what[:120]!a} is no server: write openenv/ws://HOST:PORT, or wss://")
    manifest = Manifest(name=parts.netloc)
    return _plan(reference, section, common, arguments, manifest, package=common.package(), remote=reference.what)


def read_manifest(folder: Path) -> Manifest:
    """A project's openenv.yaml. Raises UnknownEnvironment without one, ConfigError for one that says nothing."""
    place = folder / MANIFEST
    if not place.is_file():
        raise UnknownEnvironment(f"there is no {place}; name a folder made by `openenv init`, or a server as ws://HOST:PORT")
    try:
        return msgspec.convert(yaml.safe_load(place.read_bytes()[: 1 << 20]), Manifest)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"cannot be used: {str(error).splitlines()[0][:200]}", file=place) from None
