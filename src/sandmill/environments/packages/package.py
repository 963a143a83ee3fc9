"""What is installed for one environment. In: requirements and files that a person named. Out: a frozen record, and a digest."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sandmill.errors import ConfigError

FILES: Final = "/opt/env/files"
"""Where a package's own files lie in its sandbox."""
_LARGEST_FILES_BYTES: Final = 16 << 30
_MOST_FILES: Final = 50_000
_PYTHON: Final = re.compile(r"3\.[0-9]{1,2}")


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder of this machine, and its place below FILES."""

    source: str
    place: str
    secret: bool = False
    """Only the worker reads it, and no process that grades: it holds answers."""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is installed: pinned requirements, those to take `bare` (without what they ask for, Python included), and one's own.

    `python`: "3.11", the path of one, or empty for the one that sandboxes have.
    """

    requirements: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    """Paths of wheels, source archives and project folders."""
    files: tuple[Copied, ...] = ()
    python: str = ""

    @property
    def needs_packages(self) -> bool:
        """Whether anything but files is installed."""
        return bool(self.requirements or self.bare or self.local)


def pinned(texts: Iterable[str], field: str) -> tuple[str, ...]:
    """Requirements in one spelling, sorted. Raises ConfigError for what is none, names a URL, or leaves the version open."""
    found = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise ConfigError(
                f"{text[:100]!a} is no requirement ({str(error).splitlines()[0]}); write name==version", field=field
            ) from None
        if requirement.url is not None:
            raise ConfigError(f"{text[:100]!a} names a URL; write name==version, or the path of a wheel or folder", field=field)
        if not any(one.operator in ("==", "===") and "*" not in one.version for one in requirement.specifier):
            raise ConfigError(f"{text[:100]!a} leaves the version open; pin it: {requirement.name}==VERSION", field=field)
        requirement.name = canonicalize_name(requirement.name)
        found.append(str(requirement))
    return tuple(sorted(set(found)))


def check_python(version: str, field: str) -> str:
    """A Python as "3.11", or its path. Raises ConfigError."""
    if version and not _PYTHON.fullmatch(version) and not (version.startswith("/") and version.isprintable()):
        raise ConfigError(f"a Python is written as 3.11 or as the path of one, not {version[:40]!a}", field=field)
    return version


class Place(NamedTuple):
    """One file of what is copied."""

    place: str
    path: Path
    mode: int


def digest_of_files(copied: Iterable[Copied]) -> str:
    """sha256 over names, permissions and contents. Raises ConfigError."""
    whole = hashlib.sha256(b"sandmill files 1\0")
    for place, path, mode in walk(copied):
        whole.update(f"{place}\0{mode:o}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                whole.update(data)
    return whole.hexdigest()


def walk(copied: Iterable[Copied]) -> list[Place]:
    """Every file, folders taken apart, sorted by place. Raises ConfigError for links out, too many or too large ones."""
    found: list[Place] = []
    size = 0
    for one in copied:
        top = Path(one.source)
        if not top.exists():
            raise ConfigError("does not exist", file=one.source)
        for path in [top] if top.is_file() else _below(top):
            info = path.stat()
            size += info.st_size
            mode = (0o700 if info.st_mode & 0o100 else 0o600) if one.secret else 0o755 if info.st_mode & 0o100 else 0o644
            found.append(Place(one.place if top.is_file() else f"{one.place}/{path.relative_to(top)}", path, mode))
        if len(found) > _MOST_FILES or size > _LARGEST_FILES_BYTES:
            raise ConfigError(f"has more than {_MOST_FILES} files or {_LARGEST_FILES_BYTES} bytes; name a smaller folder", file=one.source)
    return sorted(found)


def _below(top: Path) -> Iterable[Path]:
    """Files of a folder, without caches, repositories and links that lead out of it."""
    real = top.resolve()
    for folder, names, files in os.walk(top):
        names[:] = sorted(
            name for name in names if name not in ("__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache")
        )
        for name in sorted(files):
            path = Path(folder) / name
            if path.is_symlink() and not path.resolve().is_relative_to(real):
                raise ConfigError(f"is a link that leads out of {top}; copy what it means", file=path)
            if path.is_file():
                yield path
