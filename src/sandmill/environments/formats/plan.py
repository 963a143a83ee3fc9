"""The nouns of a format: what a reference says, what a manifest's options may be, and the plan that they come to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from sandmill.config.manifest import EnvironmentSection, Option
from sandmill.config.quantities import parse_bytes
from sandmill.environments.packages.package import Package, check_python, pinned
from sandmill.errors import ConfigError, UnknownEnvironment

O = TypeVar("O", bound="CommonOptions")  # noqa: E741 - the one letter for options
FIELD: Final = "spec.environment.options"
_ADAPTERS: Final = Path(__file__).parent / "adapters"


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """`FORMAT/WHAT[@VERSION]`, taken apart."""

    text: str
    format: str
    what: str
    version: str

    def needed_version(self, example: str) -> str:
        """Its version. Raises UnknownEnvironment when it has none."""
        if not self.version:
            raise UnknownEnvironment(f"environment {self.text!a} needs a version: write {self.text}@{example}")
        return self.version


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Options of every format."""

    requirements: tuple[str, ...] = ()
    """More to install, pinned: "sympy==1.14.0"."""
    local: tuple[str, ...] = ()
    """Wheels, source archives and project folders to install."""
    python: str = ""
    """"3.12", or the path of a Python; empty for the one that sandboxes have."""
    memory: str = "2Gi"
    """Of the sandbox that the package runs in."""
    cpu: float | msgspec.UnsetType = msgspec.UNSET
    """Cores of that sandbox; unset: as many as packages have. Unset it is in no digest."""
    pass_at: float | None = None
    """The reward from which on an episode counts as passed; unset: as the package says."""
    allow_answers_in_prompts: bool = False
    """Takes tasks whose prompt ends with their answer."""

    def package(self, requirements: Iterable[str] = (), also_local: tuple[str, ...] = (), **more: Any) -> Package:
        """What to install: the format's own requirements and the user's. Raises ConfigError."""
        parse_bytes(self.memory, field=f"{FIELD}.memory")
        asked = pinned(self.requirements, f"{FIELD}.requirements")
        own = pinned(requirements, "spec.environment.name")
        named = {text.partition("==")[0] for text in asked}
        kept = tuple(text for text in own if text.partition("==")[0].partition("[")[0] not in named)
        python = check_python(self.python, f"{FIELD}.python")
        return Package(requirements=tuple(sorted({*kept, *asked})), local=(*also_local, *self.local), python=python, **more)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to install, and how to load it."""

    reference: str
    name: str
    version: str
    package: Package
    adapter: str
    """Source of the program that loads it."""
    beside: Mapping[str, str] = {}
    """Sources of modules that it imports, by name."""
    load: Mapping[str, Any]
    """What the adapter's `load` is given."""
    common: CommonOptions
    source: str
    """Where its tasks are from, for messages: a file, or the reference."""
    remote: str = ""
    """A server that is running already, by its URL; then nothing is installed and the adapter runs here."""


class Format(Protocol):
    """A module of this folder."""

    def plan(self, reference: Reference, section: EnvironmentSection) -> Plan:
        """Raises ConfigError, UnknownEnvironment. Installs nothing."""
        ...


def adapter(name: str) -> str:
    """The source of an adapter of this folder."""
    return (_ADAPTERS / f"{name}.py").read_text("utf-8")


def parse_options(kind: type[O], options: Mapping[str, Option], *, others: bool = False) -> tuple[O, dict[str, Option]]:
    """A manifest's options as a record, and, where a format takes `others`, the rest. Raises ConfigError naming the nearest."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    rest = {key: value for key, value in options.items() if key not in known}
    if rest and not others:
        key = next(iter(rest))
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
        raise ConfigError(f"there is no such option; {hint}", field=f"{FIELD}.{key}")
    for key, value in options.items():
        if key in known:
            try:
                msgspec.convert({key: value}, kind) if not _required(kind) else msgspec.convert({**options, key: value}, kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{str(error).split(' - at')[0][:200]}", field=f"{FIELD}.{key}") from None
    return msgspec.convert({key: value for key, value in options.items() if key in known}, kind), rest


def _required(kind: type[msgspec.Struct]) -> bool:
    return any(field.required for field in msgspec.structs.fields(kind))
