"""`verifiers-v1/NAME@VERSION`: a package with a Taskset of verifiers 0.4. NAME may be a project's folder, too.

Other options configure the taskset, and the package's own Env where it has one. verifiers itself is pinned by the option `verifiers`. The
model converses and calls the tasks' tools; tasks that need a container of their own, and packages that let several agents play or one agent
several times, are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import CommonOptions, Plan, Reference, adapter, parse_options
from sandmill.environments.formats.verifiers_v0 import project_name
from sandmill.errors import UnknownEnvironment

EXAMPLE: Final = "0.1.0"
DEFAULT: Final = "0.4.0"


class V1Options(CommonOptions, frozen=True, kw_only=True, rename="camel"):
    """Besides the common ones."""

    verifiers: str = DEFAULT
    """Version of verifiers, 0.4.x."""
    module: str = ""
    """The module that exports the taskset; empty: the package's name with underscores."""


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    options, arguments = parse_options(V1Options, section.options, others=True)
    folder = Path(reference.what).expanduser()
    local: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    if folder.is_dir():
        name, local = project_name(folder), (str(folder),)
    elif "/" in reference.what:
        raise UnknownEnvironment(f"there is no folder {reference.what[:200]}; write verifiers-v1/NAME@VERSION or a project's folder")
    else:
        name, own = reference.what, (f"{reference.what}=={reference.needed_version(EXAMPLE)}",)
    return Plan(
        reference=reference.text,
        name=f"verifiers-v1/{name}",
        version=reference.version,
        package=options.package([f"verifiers=={options.verifiers}", *own], also_local=local),
        adapter=adapter("verifiers_v1"),
        beside={name: adapter(name) for name in ("verifiers_env", "turns")},
        load={"module": options.module or name.replace("-", "_"), "package": name, "arguments": arguments},
        common=options,
        source=reference.text,
    )
