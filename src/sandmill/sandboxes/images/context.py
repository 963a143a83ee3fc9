"""The files that a build may copy. In: a folder, its .dockerignore, and what a COPY names. Out: entries, and a digest of all they hold.

Nothing outside the folder is ever read: sources with `..` are refused, links are copied as links, and files are opened without
following any.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sandmill.sandboxes.images.dockerfile import Instruction

IGNORE_FILE: Final = ".dockerignore"
_LARGEST_FILE: Final = 1 << 29
_MOST_ENTRIES: Final = 200_000
_CHUNK: Final = 1 << 20


class Entry(NamedTuple):
    """One file, folder or link of the context. `inside`: its path below what was named; empty for a file that was named itself."""

    path: str
    inside: str
    mode: int
    folder_named: bool


class Context:
    """A build's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rules = _rules(folder / IGNORE_FILE)

    def find(self, sources: Sequence[str], instruction: Instruction) -> list[Entry]:
        """What the sources of a COPY are, sorted. Raises ConfigError for one that matches nothing."""
        found: list[Entry] = []
        for source in sources:
            parts = [part for part in source.split("/") if part not in ("", ".")]
            if ".." in parts:
                raise instruction.refuse(f"{source!r} lies outside the context; a COPY reads only from there")
            before = len(found)
            for path in _matching(self._folder, parts):
                found.extend(self._below(path, instruction))
            if len(found) == before:
                raise instruction.refuse(f"nothing in {self._folder} matches {source!r}, or {IGNORE_FILE} leaves it out")
            if len(found) > _MOST_ENTRIES:
                raise instruction.refuse(f"{source!r} is more than {_MOST_ENTRIES} files; leave some out by {IGNORE_FILE}")
        return found

    def data(self, entry: Entry, instruction: Instruction) -> bytes:
        """A file's contents, or a link's target."""
        place = self._folder / entry.path
        if stat.S_ISLNK(entry.mode):
            return os.fsencode(os.readlink(place))
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise instruction.refuse(f"{entry.path!r} of the context cannot be read: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size > _LARGEST_FILE:
                raise instruction.refuse(f"{entry.path!r} is larger than {_LARGEST_FILE} bytes, the most that one file of a COPY may be")
            return file.read(_LARGEST_FILE)

    def digest(self, entries: Sequence[Entry], instruction: Instruction) -> str:
        """Of names, kinds, permissions and contents."""
        whole = hashlib.sha256()
        for entry in entries:
            whole.update(f"{entry.mode:o} {entry.folder_named} ".encode() + os.fsencode(f"{entry.path}\0{entry.inside}\0"))
            if not stat.S_ISDIR(entry.mode):
                data = self.data(entry, instruction)
                whole.update(f"{len(data)}\0".encode() + data)
        return whole.hexdigest()

    def _below(self, path: str, instruction: Instruction) -> Iterator[Entry]:
        """A named path, and everything below it when it is a folder."""
        top = self._folder / path
        info = top.lstat()
        if not stat.S_ISDIR(info.st_mode):
            if not self._ignored(path):
                yield self._entry(path, "", info, False, instruction)
            return
        yield Entry(path, "", stat.S_IFDIR | (info.st_mode & 0o777), True)
        for folder, names, files in os.walk(top):
            names.sort()
            for name in sorted([*names, *files]):
                place = Path(folder) / name
                relative = os.path.relpath(place, self._folder)
                if not self._ignored(relative):
                    yield self._entry(relative, os.path.relpath(place, top), place.lstat(), True, instruction)

    def _entry(self, path: str, inside: str, info: os.stat_result, folder_named: bool, instruction: Instruction) -> Entry:
        kind = stat.S_IFMT(info.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise instruction.refuse(f"{path!r} of the context is neither a file nor a folder nor a link")
        return Entry(path, inside, kind | (info.st_mode & 0o777), folder_named)

    def _ignored(self, path: str) -> bool:
        ignored = False
        for pattern, keeps in self._rules:
            if pattern.fullmatch(path):
                ignored = not keeps
        return ignored


def _matching(folder: Path, parts: Sequence[str]) -> list[str]:
    """Paths below `folder` that fit, name by name; a link on the way leads nowhere."""
    found = [""]
    for part in parts:
        fits = re.compile(_regex(part))
        further = []
        for above in found:
            place = folder / above
            if above and (place.is_symlink() or not place.is_dir()):
                continue
            further += [os.path.join(above, name) for name in sorted(os.listdir(place)) if name == part or fits.fullmatch(name)]
        found = further
    return [path or "." for path in found]


def _rules(file: Path) -> list[tuple[re.Pattern[str], bool]]:
    """Patterns of a .dockerignore; True for those that keep what an earlier one left out."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    rules = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        keeps = text.startswith("!")
        path = "/".join(part for part in text.removeprefix("!").split("/") if part not in ("", "."))
        rules.append((re.compile(_regex(path) + "(?:/.*)?", re.DOTALL), keeps))
    return rules


def _regex(pattern: str) -> str:
    """Of a pattern in which * and ? stop at slashes and ** does not."""
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(pieces.get(piece) or re.escape(piece) for piece in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern))
