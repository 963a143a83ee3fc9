"""A task's Dockerfile in; the same with what cannot matter here left out, line for line, for the builder of images.

What starts a container's service or describes it changes no file. A FROM that the store does not have becomes the base that the options
name; without one it is refused by the builder, with its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

_NOTHING_HERE: Final = frozenset({"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
_FROM: Final = re.compile(r"(?P<head>\s*FROM\s+(?:--platform=\S+\s+)?)(?P<image>\S+)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)


def adapted(text: str, *, base: str, has: Callable[[str], bool], skip_run: bool) -> str:
    """The text for the builder, as many lines as before. `has`: whether the store has an image of this name."""
    return "\n".join(_adapted(instruction, base, has, skip_run) for instruction in _instructions(text))


def from_words(text: str) -> tuple[str, ...]:
    """The images that it starts from."""
    return tuple(match["image"] for one in _instructions(text) if (match := _FROM.fullmatch(one)))


def _adapted(instruction: str, base: str, has: Callable[[str], bool], skip_run: bool) -> str:
    words = instruction.split(None, 1)
    name = words[0].upper() if words else ""
    if name in _NOTHING_HERE or (skip_run and name == "RUN"):
        return "\n" * instruction.count("\n")
    match = _FROM.fullmatch(instruction)
    if match is None or not base or has(match["image"]):
        return instruction
    return f"{match['head']}{base}{match['rest']}"


def _instructions(text: str) -> Iterator[str]:
    """Each instruction with the lines that go on from it; comments and empty lines by themselves."""
    kept: list[str] = []
    for line in text.split("\n"):
        bare = line.strip()
        if kept and (not bare or bare.startswith("#")):
            kept.append(line)
            continue
        kept.append(line)
        if bare.endswith("\\") and not bare.startswith("#"):
            continue
        yield "\n".join(kept)
        kept = []
    if kept:
        yield "\n".join(kept)
