"""A project's source in; a wheel of it out. Its build runs in a sandbox without a network, with the tools that it asks for.

In: a folder or a source archive. Outside the sandbox nothing of it is run or imported; of an archive, only pyproject.toml is read.
"""

from __future__ import annotations

import os
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sandmill.environments.packages.package import FILES, Copied, Package
from sandmill.environments.packages.wheels import PYTHON
from sandmill.environments.verdicts import reason_of
from sandmill.errors import EnvironmentFailed, SandboxFileError
from sandmill.sandboxes import Completed, Image, Sandbox, SandboxSpec

_BUILD_S: Final = 900.0
_LARGEST_WHEEL: Final = 512 << 20
_LARGEST_PYPROJECT: Final = 1 << 20
_MOST_ROUNDS: Final = 3
_LEGACY: Final = ("setuptools<81", "wheel")
"""What a project without a [build-system] was written for."""
_ARCHIVES: Final = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_BUILD: Final = f"""
import importlib, json, os, sys, tarfile, zipfile
asked = json.load(open("asked.json"))
place = "{FILES}/source"
if asked["archive"]:
    os.mkdir("source")
    if asked["archive"].endswith(".zip"):
        zipfile.ZipFile(place + "/" + asked["archive"]).extractall("source")
    else:
        tarfile.open(place + "/" + asked["archive"]).extractall("source")
    (top,) = os.listdir("source")
    place = os.path.abspath("source/" + top)
home = os.getcwd()
os.mkdir("out")
os.chdir(place)
sys.path[:0] = [os.path.abspath(part) for part in asked["path"]]
module, _, name = asked["backend"].partition(":")
backend = importlib.import_module(module)
for part in name.split(".") if name else ():
    backend = getattr(backend, part)
more = [one for one in getattr(backend, "get_requires_for_build_wheel", lambda: [])() if one not in asked["requires"]]
wheel = None if more else backend.build_wheel(home + "/out")
json.dump({{"wheel": wheel, "more": more}}, open(home + "/built.json", "w"))
"""


class BuildSystem(msgspec.Struct, frozen=True, kw_only=True):
    """[build-system] of a pyproject.toml (PEP 518)."""

    requires: tuple[str, ...] = _LEGACY
    build_backend: str = msgspec.field(name="build-backend", default="setuptools.build_meta:__legacy__")
    backend_path: tuple[str, ...] = msgspec.field(name="backend-path", default=())


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What the build left in built.json."""

    wheel: str | None
    more: tuple[str, ...]


Provide = Callable[[Package], Awaitable[Image]]
"""Installs the tools of a build; the image is held until the build is over."""


async def build_wheel(source: Path, target: Path, python: str, provide: Provide) -> Path:
    """Builds the project in `source` into the folder `target`. `python`: as a package names it. Raises EnvironmentFailed."""
    system = build_system(source)
    requires = system.requires
    for _ in range(_MOST_ROUNDS):
        for text in requires:
            _check(text, source)
        files = (Copied(source=str(source), place=f"source/{source.name}" if source.is_file() else "source"),)
        image = await provide(Package(requirements=requires, files=files, python=python))
        wheel, more = await _run(source, target, image, system, requires)
        if wheel is not None:
            return wheel
        requires = (*requires, *more)
    raise EnvironmentFailed(f"{source.name} asks for more and more to be built: {', '.join(requires)[:300]}; build a wheel of it yourself")


def build_system(source: Path) -> BuildSystem:
    """How a project wants to be built. Raises EnvironmentFailed."""
    try:
        data = _pyproject(source)
        table = {} if data is None else tomllib.loads(data.decode()).get("build-system", {})
        return msgspec.convert(table, BuildSystem)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise EnvironmentFailed(f"the pyproject.toml of {source.name} cannot be used: {reason_of(error)}") from error
    except (OSError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise EnvironmentFailed(f"{source.name} cannot be read: {reason_of(error)}") from error


def _pyproject(source: Path) -> bytes | None:
    """The file at the top of a project; None without one."""
    if source.is_dir():
        place = source / "pyproject.toml"
        if not place.exists() and not (source / "setup.py").exists():
            raise EnvironmentFailed(f"{source} has neither pyproject.toml nor setup.py; name a project, a wheel or a source archive")
        return place.read_bytes()[:_LARGEST_PYPROJECT] if place.exists() else None
    if not source.name.endswith(_ARCHIVES):
        raise EnvironmentFailed(f"{source.name} is no source archive; those end in {', '.join(_ARCHIVES)}")
    if source.name.endswith(".zip"):
        with zipfile.ZipFile(source) as archive:
            for info in archive.infolist():
                if _at_top(info.filename):
                    with archive.open(info) as file:
                        return file.read(_LARGEST_PYPROJECT)
        return None
    with tarfile.open(source) as packed:
        for member in packed:
            if _at_top(member.name) and member.isreg():
                contents = packed.extractfile(member)
                return None if contents is None else contents.read(_LARGEST_PYPROJECT)
    return None


def _at_top(name: str) -> bool:
    return name.removeprefix("./").count("/") == 1 and name.endswith("/pyproject.toml")


def _check(text: str, source: Path) -> None:
    try:
        if Requirement(text).url is None:
            return
    except InvalidRequirement:
        pass
    raise EnvironmentFailed(f"{source.name} needs {text[:100]!a} to be built, which is no plain requirement; build a wheel of it yourself")


async def _run(
    source: Path, target: Path, image: Image, system: BuildSystem, requires: tuple[str, ...]
) -> tuple[Path | None, tuple[str, ...]]:
    asked = {
        "archive": source.name if source.is_file() else "",
        "backend": system.build_backend,
        "path": system.backend_path,
        "requires": requires,
    }
    spec = SandboxSpec.of(memory="2Gi", disk="1Gi", image=image.digest, workdir="/build", timeout=2 * _BUILD_S, idle_timeout=2 * _BUILD_S)
    files = {"asked.json": msgspec.json.encode(asked), "build.py": _BUILD.encode()}
    async with await Sandbox.from_spec.aio(spec, files=files, server="") as sandbox:
        user = "user" if os.geteuid() else "root"
        done = await sandbox.run.aio(PYTHON, "-P", "build.py", user=user, timeout=_BUILD_S, merge_stderr=True)
        if done.exit_code != 0:
            raise EnvironmentFailed(f"{source.name} could not be built: {_last_line(done)}")
        try:
            built = msgspec.json.decode(await sandbox.read.aio("built.json", max_bytes=1 << 16), type=Built)
            if built.wheel is None:
                return None, built.more
            parse_wheel_filename(built.wheel)
            data = await sandbox.read.aio(f"out/{built.wheel}", max_bytes=_LARGEST_WHEEL)
        except (SandboxFileError, msgspec.MsgspecError, InvalidWheelFilename) as error:
            raise EnvironmentFailed(f"the build of {source.name} left no wheel: {reason_of(error)}") from error
    wheel = target / built.wheel
    wheel.write_bytes(data)
    return wheel, ()


def _last_line(done: Completed) -> str:
    if done.timed_out:
        return f"it took longer than {_BUILD_S:g} s"
    lines = [line.strip() for line in done.stdout[-4096:].decode("utf-8", "replace").splitlines() if line.strip()]
    said = lines[-1][:300] if lines else "it said nothing"
    return f"it ended with {'a signal' if done.exit_code is None else f'exit code {done.exit_code}'}: {ascii(said)[1:-1]}"


__all__ = ["BuildSystem", "Provide", "build_system", "build_wheel"]
