"""How an image is built, as a Dockerfile and a folder. In: an Image's spec and blobs. Out: the text, and the files that its COPYs name.

Archives are whatever a caller uploaded: only plain files and folders of them are taken, below the folder, within a bound.
"""

from __future__ import annotations

import gzip
import json
import lzma
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sandmill.errors import ConfigError
from sandmill.server.records import Value

_MOST_BYTES: Final = 4 << 30
_LONGEST_TEXT: Final = 1 << 20
_MOST_ENTRIES: Final = 100_000
_DEEPEST: Final = 100
_ONE_FILE: Final = "file"


def dockerfile_of(steps: Sequence[Value], base: str, user: str | None, parts: Sequence[tuple[Path, bool]]) -> str:
    """The Dockerfile of a base and steps, which root takes, `user` being the base's own (None: there is no root here).

    `parts`: for each copied blob in order, its folder and whether it is one file.
    """
    lines = [f"FROM {base}", *([] if user is None else ["USER root"])]
    folders = iter(parts)
    for step in steps:
        if "run" in step:
            lines.append("RUN " + json.dumps(["/bin/sh", "-ec", "\n".join(step["run"])]))
        elif "env" in step:
            lines += [f"ENV {name}={_quoted(value)}" for name, value in step["env"].items()]
        elif "workdir" in step:
            lines.append(f"WORKDIR {_quoted(step['workdir'])}")
        else:
            folder, one_file = next(folders)
            source = f"{folder.name}/{_ONE_FILE}" if one_file else f"{folder.name}/"
            lines.append("COPY " + json.dumps([source, step["copy"]["dest"]]))
    if user is not None:
        lines.append(f"USER {_quoted(user)}")
    return "\n".join(lines)


def text_in(blob: Path) -> str:
    """A Dockerfile. Blocks. Raises ConfigError."""
    with blob.open("rb") as file:
        data = file.read(_LONGEST_TEXT + 1)
    if len(data) > _LONGEST_TEXT:
        raise ConfigError(f"a Dockerfile has {_LONGEST_TEXT} bytes at most", field="blob")
    return data.decode("utf-8", "replace")


def unpack(archive: Path, folder: Path) -> None:
    """A tar archive, compressed or not, into an empty folder. Blocks. Raises ConfigError."""
    folder.mkdir(mode=0o755)
    try:
        with tarfile.open(archive, "r|*") as members:
            _unpack(members, folder)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, UnicodeError, ValueError) as error:
        raise ConfigError(f"the archive cannot be read: {ascii(str(error))[1:-1][:200]}", field="blob") from error
    except OSError as error:
        raise ConfigError(f"the archive cannot be unpacked: {error.strerror or error}", field="blob") from error


def unpack_part(blob: Path, folder: Path, dest: str) -> bool:
    """What a copy step's blob holds, into an empty folder; True when it stands for one file, then called `file`. Blocks.

    An archive of one file is that file where the destination has its name, and a folder with that file otherwise: its sender
    archives both the same way. A blob that is no archive is a file.
    """
    if not _is_archive(blob):
        folder.mkdir(mode=0o755)
        shutil.copyfile(blob, folder / _ONE_FILE)
        return True
    unpack(blob, folder)
    found = list(folder.iterdir())
    if len(found) != 1 or not found[0].is_file() or found[0].name != posixpath.basename(dest):
        return False
    found[0].rename(folder / _ONE_FILE)
    return True


def _is_archive(path: Path) -> bool:
    try:
        with tarfile.open(path, "r|*") as members:
            members.next()
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError):
        return False
    return True


def _unpack(members: tarfile.TarFile, folder: Path) -> None:
    size = 0
    for entries, member in enumerate(members, 1):
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        size += member.size
        if ".." in parts or "\0" in member.name or len(parts) > _DEEPEST:
            raise ConfigError(f"the archive names {member.name[:200]!a}, which lies outside it", field="blob")
        if entries > _MOST_ENTRIES or size > _MOST_BYTES:
            raise ConfigError(f"the archive holds more than {_MOST_ENTRIES} entries or {_MOST_BYTES} bytes", field="blob")
        place = folder.joinpath(*parts)
        if member.isdir():
            place.mkdir(mode=0o755, parents=True, exist_ok=True)
        elif member.isreg():
            _write(members, member, place)
        else:
            raise ConfigError(f"{member.name[:200]!a} of the archive is neither a file nor a folder", field="blob")


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    source = members.extractfile(member)
    assert source is not None
    with place.open("wb") as file:  # no link is ever made here, so none is followed
        while data := source.read(1 << 20):
            file.write(data)
    place.chmod(0o755 if member.mode & 0o100 else 0o644)


def _quoted(text: str) -> str:
    """A word that means itself in a Dockerfile."""
    return '"' + "".join(f"\\{letter}" if letter in '\\"$' else letter for letter in text) + '"'
