"""Reading a Dockerfile. In: its text. Out: instructions with their lines; or one sentence with file and line.

One stage of FROM, COPY, ENV, WORKDIR, RUN, USER and ARG. Whatever else Dockerfiles may hold is refused rather than passed over: an
image that lacks what its file says is worse than none.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from sandmill.errors import ConfigError

INSTRUCTIONS: Final = ("FROM", "COPY", "ENV", "WORKDIR", "RUN", "USER", "ARG")
_INSTEAD: Final = {
    "ADD": "COPY",
    "CMD": "RUN",
    "ENTRYPOINT": "RUN",
    "SHELL": "RUN",
    "HEALTHCHECK": "RUN",
    "ONBUILD": "RUN",
    "STOPSIGNAL": "RUN",
    "LABEL": "ENV",
    "MAINTAINER": "ENV",
    "EXPOSE": "ENV",
    "VOLUME": "WORKDIR",
}
_FLAGS: Final = {"COPY": ("chown", "chmod"), "FROM": ("platform",)}
_LONGEST: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Lookup = Callable[[str], str | None]


class Instruction(NamedTuple):
    """One instruction; `text` is what follows its name and flags, lines joined, nothing replaced yet."""

    file: str
    line: int
    name: str
    flags: dict[str, str]
    text: str

    def refuse(self, message: str) -> ConfigError:
        """The error that names its place."""
        return ConfigError(message, file=self.file, line=self.line, field=self.name)


def parse(text: str, file: str = "Dockerfile") -> tuple[Instruction, ...]:
    """All instructions, ARGs before the one FROM included. Raises ConfigError."""
    if len(text) > _LONGEST or "\0" in text:
        raise ConfigError(f"a Dockerfile is text of at most {_LONGEST} characters", file=file)
    found = tuple(_instruction(file, line, joined) for line, joined in _joined(text, file))
    froms = [one for one in found if one.name == "FROM"]
    if not froms:
        raise ConfigError("there is no FROM; begin with `FROM host` or an image's name", file=file)
    for one in found[: found.index(froms[0])]:
        if one.name != "ARG":
            raise one.refuse("only ARG may come before FROM")
    if len(froms) > 1:
        raise froms[1].refuse("a second stage is not supported; build it as an image of its own and name that in FROM")
    return found


def words(text: str, lookup: Lookup, instruction: Instruction) -> list[str]:
    """Words as a Dockerfile means them: quotes, backslashes, and $NAME, ${NAME}, ${NAME:-else}, ${NAME:+then} outside single quotes."""
    return list(_Words(text, lookup, instruction).all())


def json_words(text: str) -> list[str] | None:
    """The words of the form `["a", "b"]`; None when it is not that form."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and found and all(isinstance(word, str) for word in found) else None


def _joined(text: str, file: str) -> Iterator[tuple[int, str]]:
    """Each instruction's first line number and whole text."""
    began, parts, at_top = 0, list[str](), True
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.rstrip("\r")
        bare = line.strip()
        if bare.startswith("#"):
            directive = re.fullmatch(r"#\s*escape\s*=\s*(\S)\s*", bare) if at_top else None
            if directive and directive[1] != "\\":
                raise ConfigError(f"the escape character can only be a backslash, not {directive[1]!r}", file=file, line=number)
            continue
        if not bare:
            continue
        at_top = False
        began = began or number
        going_on = line.rstrip().endswith("\\")
        parts.append(line.rstrip()[:-1] if going_on else line)
        if not going_on:
            yield began, "".join(parts).strip()
            began, parts = 0, []
    if parts:
        yield began, "".join(parts).strip()


def _instruction(file: str, line: int, text: str) -> Instruction:
    word, _, rest = text.replace("\t", " ", 1).partition(" ")
    name = word.upper()
    if name not in INSTRUCTIONS:
        near = _INSTEAD.get(name) or (difflib.get_close_matches(name[:40], INSTRUCTIONS, n=1, cutoff=0) or ["RUN"])[0]
        raise ConfigError(f"{word[:40]!r} is not supported; the nearest instruction is {near}", file=file, line=line)
    flags, rest = {}, rest.strip()
    while match := re.match(r"--([a-z-]+)(?:=(\S*))?\s+", rest):
        if match[1] not in _FLAGS.get(name, ()):
            known = ", ".join(f"--{flag}" for flag in _FLAGS.get(name, ())) or "no flags"
            raise ConfigError(f"{name} does not support --{match[1]}; it takes {known}", file=file, line=line)
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    made = Instruction(file, line, name, flags, rest)
    if not rest:
        raise made.refuse("it says nothing")
    if name in ("RUN", "COPY") and re.search(r"<<-?[\"']?[A-Za-z_]", rest):
        raise made.refuse("here-documents are not supported; put the text into a file of the context")
    return made


class _Words:
    """One pass over an instruction's text."""

    def __init__(self, text: str, lookup: Lookup, instruction: Instruction) -> None:
        self._text = text
        self._at = 0
        self._lookup = lookup
        self._instruction = instruction

    def all(self) -> Iterator[str]:
        """The words."""
        word, quote, begun = "", "", False
        while self._at < len(self._text):
            letter = self._text[self._at]
            self._at += 1
            if letter == quote:
                quote = ""
            elif quote == "'":
                word += letter
            elif letter in "'\"" and not quote:
                quote, begun = letter, True
            elif letter == "\\" and self._at < len(self._text):
                word, begun = word + self._escaped(quote), True
            elif letter == "$":
                word, begun = word + self._variable(), True
            elif letter.isspace() and not quote:
                if word or begun:
                    yield word
                word, begun = "", False
            else:
                word += letter
        if quote:
            raise self._instruction.refuse(f"a {quote} is never closed")
        if word or begun:
            yield word

    def _escaped(self, quote: str) -> str:
        letter = self._text[self._at]
        self._at += 1
        return letter if not quote or letter in '\\"$' else "\\" + letter

    def _variable(self) -> str:
        plain = _NAME.match(self._text, self._at)
        if plain:
            self._at = plain.end()
            return self._lookup(plain[0]) or ""
        braced = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([-+])([^{}]*))?\}").match(self._text, self._at)
        if not braced:
            raise self._instruction.refuse("only $NAME, ${NAME}, ${NAME:-else} and ${NAME:+then} are replaced; write \\$ for a dollar sign")
        self._at = braced.end()
        value = self._lookup(braced[1]) or ""
        if braced[2] == "-":
            return value or braced[3]
        return (braced[3] if value else "") if braced[2] == "+" else value
