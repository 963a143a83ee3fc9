"""`python/PATH`: a module of one's own, `tasks(split) -> rows` and `reward(completion, answer) -> number`.

A file, a folder with environment.py, or a bundle: a tar.gz with modules at its top and, below site/, the packages that they import.
What a file or folder needs is read from its own head (PEP 723: `# /// script`, `# dependencies = ["sympy==1.14.0"]`), without running it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from sandmill.config.manifest import EnvironmentSection, Option
from sandmill.environments.formats.plan import CommonOptions, Plan, Reference, adapter, parse_options
from sandmill.environments.packages.interpreter import interpreter
from sandmill.environments.packages.package import FILES, Copied, pinned
from sandmill.errors import ConfigError, UnknownEnvironment, plainly

MODULE: Final = "environment.py"
BUNDLES: Final = (".tar.gz", ".tgz")
_BLOCK: Final = re.compile(r"(?m)^# /// script\s*$\n(?P<content>(?:^#(?: .*)?$\n)+?)^# ///\s*$")


class Options(CommonOptions, frozen=True, kw_only=True, rename="camel"):
    """Besides the common ones."""

    module: str = ""
    """The module of a bundle that has tasks and reward; empty: environment."""


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    common, arguments = parse_options(Options, section.options, others=True)
    path = Path(reference.what).expanduser()
    module = path / MODULE if path.is_dir() else path
    if module.is_file() and module.name.endswith(BUNDLES):
        return _bundle(reference, path, common, arguments)
    if not module.is_file():
        raise UnknownEnvironment(f"there is no file {module}; an environment is a .py file, or a folder with {MODULE}")
    script = script_metadata(module)
    check_needed_python(script, common.python, module)
    requirements = pinned(script.get("dependencies", ()), f"{module}: dependencies")
    copied = Copied(source=str(path), place="module" if path.is_dir() else f"module/{module.name}")
    return Plan(
        reference=reference.text,
        name=f"python/{path.resolve().name.removesuffix('.py')}",
        version=reference.version,
        package=common.package(requirements, files=(copied,)),
        adapter=adapter("python_module"),
        load={"module": f"{FILES}/module/{module.name}", "arguments": arguments},
        common=common,
        source=str(module),
    )


def _bundle(reference: Reference, path: Path, options: Options, arguments: Mapping[str, Option]) -> Plan:
    """It brings what it needs."""
    name = path.name.removesuffix(".tgz").removesuffix(".tar.gz")
    return Plan(
        reference=reference.text,
        name=f"python/{name}",
        version=reference.version,
        package=options.package(files=(Copied(source=str(path), place="bundle.tar.gz", secret=True),)),
        adapter=adapter("python_module"),
        load={"bundle": f"{FILES}/bundle.tar.gz", "module": options.module or MODULE.removesuffix(".py"), "arguments": arguments},
        common=options,
        source=str(path),
    )


def check_needed_python(script: Mapping[str, Any], wanted: str, module: Path) -> None:
    """Raises ConfigError when a script's `requires-python` rules out the Python that it would run under, EnvironmentFailed without that."""
    needed = script.get("requires-python", "")
    try:
        specifier = SpecifierSet(needed)
    except (InvalidSpecifier, AttributeError, TypeError):
        raise ConfigError(f"requires-python in its `# /// script` block is {needed!a:.60}, not such as '>=3.11'", file=module) from None
    if needed and not specifier.contains(version := interpreter(wanted).version):
        raise ConfigError(f"it needs Python {needed} and would run under {version}: name another by option python", file=module)


def script_metadata(module: Path) -> dict[str, Any]:
    """The inline metadata of a script (PEP 723). Raises ConfigError."""
    try:
        match = _BLOCK.search(module.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {plainly(error)}", file=module) from None
    if match is None:
        return {}
    text = "".join(line[2:] if line.startswith("# ") else line[1:] for line in match["content"].splitlines(keepends=True))
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"its `# /// script` block is no TOML: {error}", file=module) from None
    if not isinstance(found.get("dependencies", []), list) or not all(isinstance(one, str) for one in found.get("dependencies", [])):
        raise ConfigError("dependencies in its `# /// script` block must be a list of texts", file=module)
    return found
