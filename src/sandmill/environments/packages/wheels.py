"""Wheels as a layer. In: wheel files, all of them hostile archives. Out: a virtual environment that an overlay can have below it.

Nothing of them runs, and neither does a Python: an environment is a pyvenv.cfg, a link to the interpreter and a folder. A wheel is a zip
archive whose names say where they go: most to site-packages, `NAME.data/scripts` to bin. Names that leave their folder, links, bombs and
archives that are damaged are refused by the writer of layers or here.
"""

from __future__ import annotations

import configparser
import hashlib
import io
import posixpath
import stat
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sandmill.environments.packages.interpreter import Interpreter
from sandmill.errors import ImageError
from sandmill.sandboxes.images.layers import Attributes, Budget, LayerWriter

ROOT: Final = "opt/env"
PYTHON: Final = f"/{ROOT}/bin/python"
"""The environment's own interpreter."""
_BIN: Final = f"{ROOT}/bin"
MTIME_NS: Final = 946_684_800 * 10**9
"""The same for every file, so that a layer depends on nothing but its wheels."""
_LARGEST_ENTRY_POINTS: Final = 1 << 20
_LARGEST_SCRIPT: Final = 64 << 20
_SCHEMES: Final = {"purelib": "", "platlib": "", "scripts": _BIN, "data": ROOT, "headers": f"{ROOT}/include"}


class Wheel(NamedTuple):
    """A wheel that was installed."""

    name: str
    version: str
    sha256: str
    bytes: int


def wheel_of(path: Path) -> Wheel:
    """What a wheel's name and bytes say. Raises ImageError."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise ImageError(f"{path.name[:200]!a} is not the name of a wheel: {error}") from None
    with path.open("rb") as file:
        return Wheel(name, str(version), hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def site_of(version: str) -> str:
    """Where packages lie in an environment of Python `version`, from the top of a layer."""
    return f"{ROOT}/lib/python{'.'.join(version.split('.')[:2])}/site-packages"


def unpack_wheels(paths: Sequence[Path], target: Path, python: Interpreter, max_bytes: int) -> None:
    """Writes an environment with the wheels into the empty folder `target`. Raises ImageError."""
    writer = LayerWriter(target, Budget(max_bytes=max_bytes))
    site = site_of(python.version)
    for folder in (ROOT, site, _BIN):
        writer.folder(folder, Attributes(0o755, mtime_ns=MTIME_NS))
    config = f"home = {posixpath.dirname(python.path)}\ninclude-system-site-packages = false\nversion = {python.version}\n".encode()
    writer.file(f"{ROOT}/pyvenv.cfg", Attributes(0o644, mtime_ns=MTIME_NS), len(config), io.BytesIO(config).read)
    for name in ("python", "python3"):
        writer.symlink(f"{_BIN}/{name}", python.path, Attributes(0o777, mtime_ns=MTIME_NS))
    for path in sorted(paths):
        try:
            with zipfile.ZipFile(path) as archive:
                _unpack(archive, writer, site)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeError, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"wheel {path.name[:200]!a} cannot be read ({error}); fetch it again") from error
        except OSError as error:
            raise ImageError(f"wheel {path.name[:200]!a} could not be unpacked: {error.strerror or error}") from error
    writer.finish()


def _unpack(archive: zipfile.ZipFile, writer: LayerWriter, site: str) -> None:
    for info in archive.infolist():
        if info.is_dir():
            continue
        place, is_script = _place(info.filename, site)
        executable = is_script or bool(info.external_attr >> 16 & 0o111)
        if stat.S_ISLNK(info.external_attr >> 16):
            raise ImageError(f"{info.filename[:200]!a} in a wheel is a link, which wheels have none of")
        with archive.open(info) as contents:
            attributes = Attributes(0o755 if executable else 0o644, mtime_ns=MTIME_NS)
            if is_script:
                data = contents.read(_LARGEST_SCRIPT)
                if data.startswith(b"#!python"):
                    data = b"#!" + PYTHON.encode() + data.removeprefix(b"#!python")
                writer.file(place, attributes, len(data), io.BytesIO(data).read)
            else:
                writer.file(place, attributes, info.file_size, contents.read)
        if info.filename.endswith(".dist-info/entry_points.txt") and info.filename.count("/") == 1:
            _console_scripts(archive, info, writer)


def _place(name: str, site: str) -> tuple[str, bool]:
    """Where a wheel's file goes, and whether it is a script. `..` is the writer's to refuse."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data") or not rest:
        return f"{site}/{name}", False
    scheme, _, inner = rest.partition("/")
    if scheme not in _SCHEMES:
        raise ImageError(f"{name[:200]!a} in a wheel belongs to no place that Python knows")
    return f"{_SCHEMES[scheme] or site}/{inner}", scheme == "scripts"


def _console_scripts(archive: zipfile.ZipFile, info: zipfile.ZipInfo, writer: LayerWriter) -> None:
    if info.file_size > _LARGEST_ENTRY_POINTS:
        raise ImageError(f"{info.filename[:200]!a} in a wheel is {info.file_size} bytes long")
    points = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    points.optionxform = str  # type: ignore[assignment, method-assign] # names of commands keep their case
    try:
        points.read_string(archive.read(info).decode())
    except configparser.Error as error:
        raise ImageError(f"{info.filename[:200]!a} in a wheel cannot be read: {str(error).splitlines()[0][:200]}") from None
    for name, value in points.items("console_scripts") if points.has_section("console_scripts") else ():
        module, _, attribute = value.partition("[")[0].strip().partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))) or "/" in name or name in (".", ".."):
            continue
        first = attribute.split(".")[0]
        text = f"#!{PYTHON}\nimport sys\nfrom {module} import {first}\nsys.exit({attribute}())\n".encode()
        writer.file(f"{_BIN}/{name}", Attributes(0o755, mtime_ns=MTIME_NS), len(text), io.BytesIO(text).read)
