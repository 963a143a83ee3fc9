"""Which Python runs a package. In: "3.12", or empty for the usual one. Out: its path inside every sandbox, and what wheels must fit."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import EnvironmentFailed

_FOLDERS: Final = ("/usr/bin", "/usr/local/bin")
"""What sandboxes see of this machine's programs."""
_ASK: Final = (
    "import json,platform,sys,sysconfig as s;print(json.dumps([platform.python_version(),str(s.get_config_var('SOABI')),s.get_platform()]))"
)
_ASK_S: Final = 60.0


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """A Python that sandboxes have."""

    path: str
    version: str
    identity: str
    """Everything that decides which wheels fit."""


@functools.cache
def interpreter(wanted: str) -> Interpreter:
    """The Python `wanted`. Raises EnvironmentFailed, saying which there are."""
    name = f"python{wanted or '3'}"
    path = next((f"{folder}/{name}" for folder in _FOLDERS if Path(folder, name).exists()), None)
    if path is None:
        there = sorted({found.name for folder in _FOLDERS for found in Path(folder).glob("python3.[0-9]*") if found.suffix[1:].isdigit()})
        raise EnvironmentFailed(
            f"it needs {name}, which sandboxes here do not have ({', '.join(there) or 'none'}); install it as {_FOLDERS[0]}/{name}"
        )
    try:
        asked = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, timeout=_ASK_S, check=True)
        version, abi, machine = msgspec.json.decode(asked.stdout, type=tuple[str, str, str])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        raise EnvironmentFailed(f"{path} does not work ({type(error).__name__}); reinstall it") from error
    return Interpreter(path=path, version=version, identity=f"{version.rsplit('.', 1)[0]} {abi} {machine}")
