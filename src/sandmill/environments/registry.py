"""A reference and a manifest section in, an `Environment` out.

References: `name@version` for a built-in one, `format/what@version` for one of another format (formats/), such a one under
a name of its own (registered.py), `harbor:PATH` or `swebench:PATH` for task sets that are files, or the user's own as
`path/to/file.py:object` or `package.module:object`, where the object is an environment or is called with the section to make one. What
is wrong is found here, before a run starts.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats import FORMATS as FOREIGN
from sandmill.environments.formats import is_foreign
from sandmill.environments.splits import check_splits
from sandmill.errors import ConfigError, EnvironmentFailed, SandmillError, UnknownEnvironment

if TYPE_CHECKING:
    from sandmill.environments.environment import Environment

_MEMBERS = ("name", "version", "digest", "sandbox", "splits", "files", "prepare", "collect", "grade")


def _shell(section: EnvironmentSection) -> Environment:
    from sandmill.environments.builtin.shell import ShellEnvironment

    return ShellEnvironment(section)


BUILTIN: Mapping[str, Callable[[EnvironmentSection], Environment]] = {"shell@1.0.0": _shell}
"""Reference -> factory."""


def _harbor(place: str, section: EnvironmentSection) -> Environment:
    from sandmill.environments.formats.harbor import HarborEnvironment

    return HarborEnvironment(place, section)


def _swebench(place: str, section: EnvironmentSection) -> Environment:
    from sandmill.environments.formats.swebench import SweBenchEnvironment

    return SweBenchEnvironment(place, section)


FORMATS: Mapping[str, Callable[[str, EnvironmentSection], Environment]] = {"harbor": _harbor, "swebench": _swebench}
"""`format:PATH` -> factory, for task sets that are files. They grade in sandboxes of their own."""


def is_files(reference: str) -> bool:
    """Whether a reference names a task set that is files."""
    prefix, colon, place = reference.partition(":")
    return bool(colon and place) and prefix in FORMATS


def get(reference: str, section: EnvironmentSection | None = None) -> Environment:
    """The environment that `reference` names, made from `section` (defaults where None), checked and safe to grade with.

    A built-in one grades in this process, one of another format in its sandbox, a user's own in child processes (see `isolation`).
    Raises UnknownEnvironment (naming the nearest), ConfigError (an option, an ill-formed task, a leak between splits) and
    EnvironmentFailed (the user's module raised while it was loaded).
    """
    section = section if section is not None else EnvironmentSection(name=reference)
    environment = load(reference, section)
    check_splits(environment.splits, f"{environment.name}@{environment.version}")
    if not _is_own(reference):
        return environment
    from sandmill.environments.isolation import isolated

    return isolated(environment, reference, section)


def load(reference: str, section: EnvironmentSection) -> Environment:
    """As `get`, without the check of its tasks and with its grader in this process."""
    if is_files(reference):
        prefix, _, place = reference.partition(":")
        return FORMATS[prefix](place, section)
    if _is_own(reference):
        return _own(reference, section)
    if reference in BUILTIN:
        return BUILTIN[reference](section)
    if is_foreign(reference):
        from sandmill.environments import foreign

        return foreign.load(reference, section)
    from sandmill.environments import registered

    entry = registered.find(reference)
    if entry is not None:
        return registered.load(entry, section)
    raise UnknownEnvironment(_unknown(reference, [f"{one.name}@{one.version}" for one in registered.registered()]))


def _is_own(reference: str) -> bool:
    """Whether it names an object of the user's; task sets that are files and the URL of a server have a colon, too."""
    return ":" in reference and not is_files(reference) and not ("://" in reference and is_foreign(reference))


def _unknown(reference: str, registered: Sequence[str]) -> str:
    name, _, version = reference.partition("@")
    names = [*registered, *BUILTIN]
    versions = [known for known in names if known.partition("@")[0] == name]
    if versions and not version:
        return f"environment {reference!a} needs a version: write {versions[-1]}"
    if versions:
        return f"environment {name} has no version {version!a}: write {versions[-1]}"
    form, slash, rest = reference.partition("/")
    if slash and (formats := difflib.get_close_matches(form, FOREIGN, n=1)):
        return f"there is no format {form!a}; did you mean {formats[0]}/{rest}?"
    near = difflib.get_close_matches(reference, names, n=1, cutoff=0.0)
    return f"there is no environment {reference!a}; the nearest is {near[0]} (your own: path/to/file.py:object or module:object)"


def _own(reference: str, section: EnvironmentSection) -> Environment:
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UnknownEnvironment(f"{reference!a} is not a reference: write path/to/file.py:object or module:object")
    try:
        found = getattr(_module(place), name, None)
        if found is not None and not _is_environment(found) and callable(found):
            found = found(section)
    except SandmillError:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"environment {reference} could not be loaded: {type(error).__name__}: {error}") from error
    if found is None:
        names = sorted(other for other in vars(_module(place)) if not other.startswith("_"))
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        raise UnknownEnvironment(f"{place} has no object {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    missing = [member for member in _MEMBERS if not hasattr(found, member)]
    if missing:
        raise ConfigError(f"{reference} is a {type(found).__name__}, not an environment: it lacks {', '.join(missing)}")
    return cast("Environment", found)


def _is_environment(found: object) -> bool:
    return not isinstance(found, type) and all(hasattr(found, member) for member in _MEMBERS)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
                raise UnknownEnvironment(f"there is no Python module {place!r}") from error
            raise
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise UnknownEnvironment(f"there is no file {place}")
    name = f"sandmill_environment_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownEnvironment(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
