"""A source bundle, before anything is done with it. In: an uploaded tar.gz. Out: what it needs; or ConfigError naming the entry.

Nothing is written here: the bundle is unpacked in the sandbox of its package, with the limits of that sandbox. What would leave its
folder there, or is anything but files and folders, is refused on sight, and no more is inflated than a bundle may hold.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from pathlib import Path
from typing import Final

from sandmill.errors import ConfigError

LARGEST: Final = 64 << 20
LARGEST_UNPACKED: Final = 128 << 20
MOST_ENTRIES: Final = 20_000
_LARGEST_MODULE: Final = 16 << 20
_DEEPEST: Final = 50
_LONGEST_NAME: Final = 1000
_IMPORT: Final = re.compile(rb"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))", re.MULTILINE)
BASE: Final = {
    "jsonschema": "jsonschema==4.26.0",
    "math_verify": "math-verify==0.9.0",
    "numpy": "numpy==2.5.3",
    "openenv": "openenv==0.7.0",
    "reasoning_gym": "reasoning-gym==0.1.25",
    "regex": "regex==2026.9.29",
    "sympy": "sympy==1.14.0",
}
"""Packages that the published client takes for installed, by what they are imported as: it never puts them into a bundle."""
_OLDER: Final = {"numpy": "numpy==2.4.4"}
"""For a Python before 3.12."""


def check_bundle(path: Path, module: str, python: str) -> tuple[str, ...]:
    """What of `BASE` the `module` at its top imports and the bundle does not bring, for a Python such as "3.11". Blocks.

    Raises ConfigError.
    """
    tops: set[str] = set()
    brought: set[str] = set()
    imported: set[str] = set()
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"the bundle has {path.stat().st_size} bytes, and may have {LARGEST}; take what its module does not need out")
        with gzip.open(path) as raw, tarfile.open(fileobj=_Bounded(raw), mode="r|") as archive:
            for number, member in enumerate(archive, 1):
                if number > MOST_ENTRIES:
                    raise ConfigError(f"the bundle has more than {MOST_ENTRIES} entries; take what its module does not need out")
                _check_member(member)
                name = member.name.removeprefix("./")
                if member.isreg() and "/" not in name:
                    tops.add(name)
                if name.startswith("site/"):
                    brought.add(name.split("/")[1].removesuffix(".py"))
                if name == f"{module}.py" and (source := archive.extractfile(member)) is not None:
                    imported = _imports(source.read(_LARGEST_MODULE))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the bundle cannot be read as a tar.gz: {ascii(str(error))[1:-1][:200]}") from error
    if f"{module}.py" not in tops:
        found = ", ".join(sorted(name[:80] for name in tops if name.endswith(".py")))[:300]
        raise ConfigError(f"the bundle has no module {module!a} at its top; it has {ascii(found)[1:-1] or 'none'}")
    older = _OLDER if tuple(map(int, python.split("."))) < (3, 12) else {}
    return tuple(sorted(older.get(name, text) for name, text in BASE.items() if name in imported - brought))


def _imports(source: bytes) -> set[str]:
    """Words that stand where a module's imports do. Not parsed: deep nesting breaks the parser, and its process with it."""
    found: set[str] = set()
    for origin, names in _IMPORT.findall(source):
        words = [origin] if origin else names.split(b",")
        found |= {word.strip().partition(b".")[0].partition(b" ")[0].decode("utf-8", "replace") for word in words}
    return found


def _check_member(member: tarfile.TarInfo) -> None:
    """One entry. Raises ConfigError."""
    shown = ascii(member.name[:200])
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts:
        raise ConfigError(f"the bundle names {shown}, which lies outside it; pack it with relative names")
    if len(parts) > _DEEPEST or len(member.name) > _LONGEST_NAME or not member.name.isprintable():
        raise ConfigError(f"the bundle names {shown}, which no module is called")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise ConfigError(f"{shown} of the bundle is neither a file nor a folder; pack what it means instead")


class _Bounded(io.RawIOBase):
    """What a stream inflates to, up to a bound: a small archive may say a gigabyte of zeros."""

    def __init__(self, source: gzip.GzipFile) -> None:
        self._source = source
        self._left = LARGEST_UNPACKED

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise ConfigError(f"the bundle unpacks to more than {LARGEST_UNPACKED} bytes; take what its module does not need out")
        return data


__all__ = ["check_bundle"]
