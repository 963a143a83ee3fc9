"""Formats of task sets that exist. In: `FORMAT/WHAT[@VERSION]` and options. Out: a `Plan` of what to install and how to load it.

Each is two small files: a description here, and an adapter in `adapters/` that runs inside the sandbox, beside the package. Formats whose
tasks are machines to work on are folders of their own.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol, cast

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import Format, Plan, Reference
from sandmill.errors import UnknownEnvironment

if TYPE_CHECKING:
    from sandmill.environments.environment import Environment
    from sandmill.environments.packages.install import Report


class Machines(Protocol):
    """A module of MACHINES."""

    def load(self, what: str, section: EnvironmentSection, report: Report) -> Environment:
        """Raises ConfigError, EnvironmentFailed. Builds no image."""
        ...


FORMATS: Final[Mapping[str, str]] = {
    "reasoning-gym": "sandmill.environments.formats.reasoning_gym",
    "verl": "sandmill.environments.formats.verl",
    "python": "sandmill.environments.formats.python_module",
    "verifiers": "sandmill.environments.formats.verifiers_v0",
    "verifiers-v1": "sandmill.environments.formats.verifiers_v1",
    "nemo-gym": "sandmill.environments.formats.nemo_gym",
    "openenv": "sandmill.environments.formats.openenv",
    "textarena": "sandmill.environments.formats.textarena",
}
"""Format -> the module that plans it."""
MACHINES: Final[Mapping[str, str]] = {
    "harbor": "sandmill.environments.formats.harbor",
    "swebench": "sandmill.environments.formats.swebench",
}
"""Format -> the module whose `load` makes one: its tasks are machines to work on, graded in sandboxes of their own."""


def is_foreign(reference: str) -> bool:
    """Whether a reference names something in one of the formats that are packages."""
    return reference.partition("/")[0] in FORMATS and "/" in reference


def is_machines(reference: str) -> bool:
    """Whether a reference names something in one of the formats whose tasks are machines to work on."""
    return reference.partition("/")[0] in MACHINES and "/" in reference


def misspelt(reference: str) -> str | None:
    """What a reference to one of the formats should have been, where a colon follows the format's name."""
    name, colon, what = reference.partition(":")
    return f"{name}/{what}" if colon and what and name in (*FORMATS, *MACHINES) else None


def plan(reference: str, section: EnvironmentSection) -> Plan:
    """What a reference and its section come to. Raises UnknownEnvironment, ConfigError naming the field."""
    name, _, rest = reference.partition("/")
    if name not in FORMATS:
        known = (*FORMATS, *MACHINES)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UnknownEnvironment(f"there is no format {name[:60]!a}; the nearest is {near[0]}/..., and there are {', '.join(known)}")
    what, _, version = rest.partition("@") if rest.count("@") == 1 else (rest, "", "")
    if not what or rest.count("@") > 1 or not rest.isprintable():
        raise UnknownEnvironment(f"{reference[:120]!a} is not a reference: write {name}/WHAT@VERSION")
    made = cast("Format", importlib.import_module(FORMATS[name]))
    return made.plan(Reference(text=reference, format=name, what=what, version=version), section)


def machines(reference: str, section: EnvironmentSection, report: Report) -> Environment:
    """The environment of a reference for which `is_machines`. Raises UnknownEnvironment, ConfigError naming the field."""
    name, _, what = reference.partition("/")
    if not what or not what.isprintable():
        raise UnknownEnvironment(f"{reference[:120]!a} is not a reference: write {name}/PATH")
    module = importlib.import_module(MACHINES[name])
    return cast("Machines", module).load(what, section, report)


__all__ = ["FORMATS", "MACHINES", "Plan", "is_foreign", "is_machines", "machines", "misspelt", "plan"]
