"""A task.toml in; a frozen record out. An unknown table or key is refused by name, with the nearest known one.

Schema versions up to 1.4 of the format; older spellings are read as what they became. `[metadata]` is free and not read.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from sandmill.config.check import nearest
from sandmill.config.quantities import parse_bytes
from sandmill.environments.formats.records import record
from sandmill.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
_Values = Callable[[Mapping[str, str], str], dict[str, str]]
SCHEMA_VERSIONS: Final = ("1.0", "1.1", "1.2", "1.3", "1.4")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)
_LARGEST_BYTES: Final = 1 << 20


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table."""


class Author(Table, frozen=True):
    """One of `[task].authors`."""

    name: str = ""
    email: str = ""


class About(Table, frozen=True):
    """`[task]`."""

    name: str = ""
    version: str = ""
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class Artifact(Table, frozen=True):
    """What a verifier in a sandbox of its own gets to see. `source` is an absolute path in the agent's sandbox."""

    source: str
    destination: str = ""
    exclude: tuple[str, ...] = ()
    service: str = ""


class Healthcheck(Table, frozen=True):
    """A command that must end with 0 before the agent begins."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Meta(ge=0)] = 0.0
    start_interval_sec: Seconds = 5.0
    retries: Annotated[int, Meta(ge=1)] = 3


class McpServer(Table, frozen=True):
    """One of `[environment].mcp_servers`. Read so that it can be refused by name."""

    name: str
    transport: str = ""
    url: str = ""
    command: str = ""
    args: tuple[str, ...] = ()


class Box(Table, frozen=True):
    """`[environment]`, and `[verifier.environment]`."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str = ""
    os: str = "linux"
    cpus: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Annotated[int, Meta(gt=0)] | None = None
    storage_mb: Annotated[int, Meta(gt=0)] | None = None
    gpus: Count = 0
    gpu_types: tuple[str, ...] = ()
    tpu: Mapping[str, str] = {}
    env: Mapping[str, str] = {}
    workdir: str = ""
    network_mode: str = ""
    allowed_hosts: tuple[str, ...] = ()
    mcp_servers: tuple[McpServer, ...] = ()
    skills_dir: str = ""
    healthcheck: Healthcheck | None = None


class Agent(Table, frozen=True):
    """`[agent]`."""

    timeout_sec: Seconds | None = None
    user: str = ""
    network_mode: str = ""
    allowed_hosts: tuple[str, ...] = ()


class Collect(Table, frozen=True):
    """A command that gathers evidence in the agent's sandbox before it is graded."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str = ""


class Verifier(Table, frozen=True):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: Mapping[str, str] = {}
    user: str = ""
    environment_mode: str = "shared"
    environment: Box | None = None
    collect: tuple[Collect, ...] = ()
    network_mode: str = ""
    allowed_hosts: tuple[str, ...] = ()


class Solution(Table, frozen=True):
    """`[solution]`."""

    env: Mapping[str, str] = {}


class Step(Table, frozen=True):
    """One of `[[steps]]`. `min_reward`: below it the task ends after this step; by reward name, `reward` where the file gives a number."""

    name: str
    agent: Agent = Agent()
    verifier: Verifier | None = None
    min_reward: Mapping[str, float] = {}
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()


class TaskFile(Table, frozen=True):
    """A whole task.toml."""

    schema_version: str = "1.4"
    source: str = ""
    artifacts: tuple[Artifact, ...] = ()
    multi_step_reward_strategy: str = "mean"
    task: About = About()
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Box = Box()
    solution: Solution = Solution()
    steps: tuple[Step, ...] = ()


def read_task_file(path: Path, host: Mapping[str, str] | None = None) -> TaskFile:
    """The record. `host` (None: this process's environment) gives the values of `${VAR}`. Raises ConfigError with file and field."""
    file = str(path)
    try:
        data = path.read_bytes()
        if len(data) > _LARGEST_BYTES:
            raise ConfigError(f"a task.toml has at most {_LARGEST_BYTES} bytes, this one {len(data)}", file=file)
        values = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}", file=file) from error
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise ConfigError(f"it is no TOML: {error}", file=file) from None
    found = record(_modern(values, file), TaskFile, file)
    _check_words(found, file)
    return _resolved(found, os.environ if host is None else host, file)


def _modern(values: dict[str, Any], file: str) -> dict[str, Any]:
    """Older spellings as the present ones, and the two keys that may be of several kinds as one kind."""
    values = {key: value for key, value in values.items() if key != "metadata"}
    if "version" in values:
        values.setdefault("schema_version", values.pop("version"))
    values["schema_version"] = str(values.get("schema_version", "1.4"))
    _artifacts(values)
    for box in (values.get("environment"), _below(values, "verifier", "environment")):
        if isinstance(box, dict):
            _modern_box(box, file)
    for step in values.get("steps", ()) if isinstance(values.get("steps"), list) else ():
        if isinstance(step, dict):
            _artifacts(step)
            if isinstance(step.get("min_reward"), int | float) and not isinstance(step["min_reward"], bool):
                step["min_reward"] = {"reward": step["min_reward"]}
    return values


def _modern_box(box: dict[str, Any], file: str) -> None:
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if isinstance(size := box.get(old), str):
            letter = size.strip().upper().removesuffix("B")
            quantity = letter + "i" if letter.endswith(("K", "M", "G", "T")) else letter
            box.setdefault(new, max(1, parse_bytes(quantity, field=f"{file}: environment.{old}") >> 20))
            del box[old]
    if isinstance(allowed := box.get("allow_internet"), bool):
        box.setdefault("network_mode", "public" if allowed else "no-network")
        del box["allow_internet"]
    if isinstance(box.get("tpu"), dict):
        box["tpu"] = {key: str(value) for key, value in box["tpu"].items()}


def _artifacts(values: dict[str, Any]) -> None:
    if isinstance(named := values.get("artifacts"), list):
        values["artifacts"] = [{"source": one} if isinstance(one, str) else one for one in named]


def _below(values: object, *keys: str) -> object:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _check_words(found: TaskFile, file: str) -> None:
    """Values that are one of a few words, and what cannot be had here."""
    modes = ("public", "no-network", "allowlist", "")
    words = [
        ("schema_version", found.schema_version, SCHEMA_VERSIONS),
        ("multi_step_reward_strategy", found.multi_step_reward_strategy, ("mean", "final")),
        ("verifier.environment_mode", found.verifier.environment_mode, ("shared", "separate")),
        ("environment.network_mode", found.environment.network_mode, modes),
        ("agent.network_mode", found.agent.network_mode, modes),
        ("verifier.network_mode", found.verifier.network_mode, modes),
        ("environment.os", found.environment.os, ("linux",)),
    ]
    for field, value, choices in words:
        if value not in choices:
            near = nearest(value, [choice for choice in choices if choice])
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"it is one of {', '.join(one for one in choices if one)}, not {value[:60]!r}{hint}", file=file, field=field)
    if found.environment.gpus or found.environment.tpu:
        raise ConfigError("the task asks for an accelerator, which a sandbox does not have", file=file, field="environment.gpus")
    if found.environment.mcp_servers:
        raise ConfigError(
            "the task's MCP servers cannot be started here; the nearest is a task without", file=file, field="environment.mcp_servers"
        )
    names = [step.name for step in found.steps]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ConfigError(f"{name[:60]!r} is no name of a folder below steps/", file=file, field="steps.name")
        if names.count(name) > 1:
            raise ConfigError(f"step {name!r} is named twice", file=file, field="steps.name")


def _resolved(found: TaskFile, host: Mapping[str, str], file: str) -> TaskFile:
    """`${VAR}` and `${VAR:-default}` replaced in every table of variables."""

    def values(env: Mapping[str, str], field: str) -> dict[str, str]:
        return {name: _value(text, host, file, f"{field}.{name}") for name, text in env.items()}

    replace = msgspec.structs.replace
    return replace(
        found,
        verifier=_resolved_verifier(found.verifier, values, "verifier"),
        environment=replace(found.environment, env=values(found.environment.env, "environment.env")),
        solution=replace(found.solution, env=values(found.solution.env, "solution.env")),
        steps=tuple(_resolved_step(step, values, number) for number, step in enumerate(found.steps)),
    )


def _resolved_step(step: Step, values: _Values, number: int) -> Step:
    verifier = None if step.verifier is None else _resolved_verifier(step.verifier, values, f"steps[{number}].verifier")
    return msgspec.structs.replace(step, verifier=verifier)


def _resolved_verifier(verifier: Verifier, values: _Values, field: str) -> Verifier:
    replace, box = msgspec.structs.replace, verifier.environment
    own = None if box is None else replace(box, env=values(box.env, f"{field}.environment.env"))
    return replace(verifier, env=values(verifier.env, f"{field}.env"), environment=own)


def _value(text: str, host: Mapping[str, str], file: str, field: str) -> str:
    match = _VARIABLE.fullmatch(text)
    if match is None:
        return text
    if match[1] in host:
        return host[match[1]]
    if match[2] is not None:
        return match[2]
    raise ConfigError(
        f"the variable {match[1]} is not set on this machine; set it, or write ${{{match[1]}:-default}}", file=file, field=field
    )
