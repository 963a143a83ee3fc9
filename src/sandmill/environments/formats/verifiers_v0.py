"""`verifiers/NAME@VERSION`: an environment package of verifiers 0.1.x, by `load_environment`. NAME may be a project's folder, too.

Other options are its keyword arguments. verifiers itself is pinned by the option `verifiers`; a package that asks for another one, or
for more than it needs, is installed `withoutDependencies`, and what it does need is named in `requirements`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import FIELD, CommonOptions, Plan, Reference, adapter, parse_options
from sandmill.environments.packages.package import pinned
from sandmill.errors import ConfigError, UnknownEnvironment, plainly

EXAMPLE: Final = "0.1.0"
DEFAULT: Final = "0.1.14"
_LARGEST_PYPROJECT: Final = 1 << 20


class Options(CommonOptions, frozen=True, kw_only=True, rename="camel"):
    """Besides the common ones."""

    verifiers: str = DEFAULT
    """Version of verifiers, 0.1.x."""
    module: str = ""
    """The module with `load_environment`; empty: the package's name with underscores."""
    without_dependencies: bool = False


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    options, arguments = parse_options(Options, section.options, others=True)
    if not options.verifiers.startswith("0.1."):
        raise ConfigError(
            f"this format is that of verifiers 0.1.x; found {options.verifiers[:40]!a} (0.4 is verifiers-v1/...)",
            field=f"{FIELD}.verifiers",
        )
    folder = Path(reference.what).expanduser()
    local: tuple[str, ...] = ()
    own = ""
    if folder.is_dir():
        name, local = project_name(folder), (str(folder),)
    elif "/" in reference.what:
        raise UnknownEnvironment(f"there is no folder {reference.what[:200]}; write verifiers/NAME@VERSION or a project's folder")
    else:
        name, own = reference.what, f"{reference.what}=={reference.needed_version(EXAMPLE)}"
    requirements = [f"verifiers=={options.verifiers}", *([] if options.without_dependencies or not own else [own])]
    bare = pinned([own], "spec.environment.name") if options.without_dependencies and own else ()
    return Plan(
        reference=reference.text,
        name=f"verifiers/{name}",
        version=reference.version,
        package=options.package(requirements, bare=bare, also_local=local),
        adapter=adapter("verifiers_v0"),
        beside={"verifiers_rollout": adapter("verifiers_rollout"), "turns": adapter("turns")},
        load={"module": options.module or name.replace("-", "_"), "package": name, "arguments": arguments},
        common=options,
        source=reference.text,
    )


def project_name(folder: Path) -> str:
    """What the project in a folder is called. Raises ConfigError."""
    place = folder / "pyproject.toml"
    try:
        name = tomllib.loads(place.read_bytes()[:_LARGEST_PYPROJECT].decode()).get("project", {}).get("name")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot be read: {plainly(error)}", file=place) from None
    if not isinstance(name, str) or not name:
        raise ConfigError("has no [project] name", file=place)
    return canonicalize_name(name)
