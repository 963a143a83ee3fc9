"""Which Python runs a package. In: "3.12", the path of one, or empty. Out: its path inside every sandbox, and what wheels must fit.

Sandboxes see the programs of /usr. A Python that lies elsewhere on this machine comes along as a layer, at its own path.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from sandmill.environments.verdicts import reason_of
from sandmill.errors import EnvironmentFailed
from sandmill.sandboxes.images.layers import Attributes, Budget, LayerWriter

_FOLDERS: Final = ("/usr/bin", "/usr/local/bin")
"""What sandboxes see of this machine's programs."""
_TAKEN: Final = ("", "usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "sys", "dev", "tmp")
_ASK: Final = (
    "import json,platform,sys,sysconfig as s;"
    "print(json.dumps([platform.python_version(),str(s.get_config_var('SOABI')),s.get_platform(),sys.base_prefix]))"
)
_ASK_S: Final = 60.0
_LEFT_OUT: Final = frozenset({"test", "tests", "site-packages", "idlelib", "tkinter", "turtledemo", "share"})
"""Of a Python that comes along."""


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """A Python that sandboxes have, or get: then `prefix` is the folder to bring."""

    path: str
    version: str
    identity: str
    """Everything that decides which wheels fit."""
    prefix: str = ""

    @property
    def digest(self) -> str:
        """Of the folder to bring, by its place and its program's size and time."""
        info = os.stat(self.path)
        return hashlib.sha256(f"{self.identity} {self.version} {self.path} {info.st_size} {info.st_mtime_ns}".encode()).hexdigest()


@functools.cache
def interpreter(wanted: str) -> Interpreter:
    """The Python `wanted`. Raises EnvironmentFailed, saying which there are."""
    if wanted.startswith("/"):
        return _elsewhere(wanted)
    name = f"python{wanted or '3'}"
    path = next((f"{folder}/{name}" for folder in _FOLDERS if Path(folder, name).exists()), None)
    if path is not None:
        version, identity, _ = _asked(path)
        return Interpreter(path=path, version=version, identity=identity)
    elsewhere = shutil.which(name)
    if elsewhere is not None:
        with contextlib.suppress(EnvironmentFailed):  # a stand-in that finds nothing behind it
            return _elsewhere(elsewhere)
    there = sorted({found.name for folder in _FOLDERS for found in Path(folder).glob("python3.[0-9]*") if found.suffix[1:].isdigit()})
    raise EnvironmentFailed(
        f"it needs {name}, which this machine does not have ({', '.join(there) or 'none'} for sandboxes); install it, or name its path"
    )


def _elsewhere(path: str) -> Interpreter:
    """A Python that has to come along. Raises EnvironmentFailed."""
    version, identity, prefix = _asked(path)
    if any(path.startswith(f"{folder}/") for folder in _FOLDERS):
        return Interpreter(path=path, version=version, identity=identity)
    own = f"{prefix}/bin/python{'.'.join(version.split('.')[:2])}"
    if not Path(own).exists() or Path(prefix).parts[1] in _TAKEN:
        raise EnvironmentFailed(
            f"{path} cannot come along into a sandbox: its folder is {prefix}; name one that lies in a folder of its own"
        )
    return Interpreter(path=own, version=version, identity=identity, prefix=prefix)


def bring(python: Interpreter, target: Path, max_bytes: int) -> None:
    """Copies a Python's own folder into the empty folder `target`, as it lies here."""
    writer = LayerWriter(target, Budget(max_bytes=max_bytes))
    above = Path(python.prefix)
    for parent in reversed(above.parents[:-1]):
        writer.folder(str(parent), Attributes(0o711))
    for path, info in _below(above):
        times = Attributes(stat.S_IMODE(info.st_mode) & 0o755 | 0o444, mtime_ns=info.st_mtime_ns)
        if stat.S_ISLNK(info.st_mode):
            writer.symlink(str(path), os.readlink(path), times)
        else:
            with path.open("rb") as file:
                writer.file(str(path), times, info.st_size, file.read)
    writer.finish()


def _below(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, names, files in os.walk(top):
        names[:] = sorted(name for name in names if name not in _LEFT_OUT)
        for name in sorted([*files, *(name for name in names if Path(folder, name).is_symlink())]):
            path = Path(folder) / name
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                yield path, info


def _asked(path: str) -> tuple[str, str, str]:
    """A Python's version, identity and folder. Raises EnvironmentFailed."""
    try:
        said = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, timeout=_ASK_S, check=True)
        version, abi, machine, prefix = msgspec.json.decode(said.stdout, type=tuple[str, str, str, str])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        raise EnvironmentFailed(f"{path} does not work ({reason_of(error)}); reinstall it") from error
    return version, f"{version.rsplit('.', 1)[0]} {abi} {machine}", prefix
