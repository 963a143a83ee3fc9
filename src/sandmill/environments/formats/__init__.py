"""Formats of task sets that exist. In: `FORMAT/WHAT[@VERSION]` and options. Out: a `Plan` of what to install and how to load it.

Each is two small files: a description here, and an adapter in `adapters/` that runs inside the sandbox, beside the package.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Final, cast

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import Format, Plan, Reference
from sandmill.errors import UnknownEnvironment

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


def is_foreign(reference: str) -> bool:
    """Whether a reference names something in one of the formats."""
    return reference.partition("/")[0] in FORMATS and "/" in reference


def plan(reference: str, section: EnvironmentSection) -> Plan:
    """What a reference and its section come to. Raises UnknownEnvironment, ConfigError naming the field."""
    name, _, rest = reference.partition("/")
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1, cutoff=0.0)
        raise UnknownEnvironment(f"there is no format {name[:60]!a}; the nearest is {near[0]}/..., and there are {', '.join(FORMATS)}")
    what, _, version = rest.partition("@") if rest.count("@") == 1 else (rest, "", "")
    if not what or rest.count("@") > 1 or not rest.isprintable():
        raise UnknownEnvironment(f"{reference[:120]!a} is not a reference: write {name}/WHAT@VERSION")
    made = cast("Format", importlib.import_module(FORMATS[name]))
    return made.plan(Reference(text=reference, format=name, what=what, version=version), section)


__all__ = ["FORMATS", "Plan", "is_foreign", "plan"]
