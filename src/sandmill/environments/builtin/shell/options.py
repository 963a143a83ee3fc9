"""The options of `shell@1.0.0`: a manifest's `options` mapping in, a frozen typed record out."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence

import msgspec

from sandmill.errors import ConfigError

DEMO_FAMILIES = ("lines", "files", "read", "sum", "last", "hop")
"""One command each (`hop`: the same command twice); these have scripted demonstrations."""
FAMILIES = (*DEMO_FAMILIES, "find", "write", "fix")


class Difficulty(enum.StrEnum):
    """How large folders are and how long references."""

    EASY = "easy"
    """6 to 9 files of 2 to 5 lines; `hop` follows one reference (two commands)."""
    MEDIUM = "medium"
    """10 to 14 files of 4 to 9 lines; `hop` follows two references (three commands)."""
    HARD = "hard"
    """12 to 16 files of 8 to 20 lines; `hop` follows three references (four commands)."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`families` are drawn in turn, in this order; `difficulty` sets sizes."""

    families: tuple[str, ...] = DEMO_FAMILIES
    difficulty: Difficulty = Difficulty.EASY


def parse_options(options: Mapping[str, object]) -> Options:
    """Checks names, types and values; each refusal is a ConfigError that names the nearest valid spelling."""
    known = tuple(field.name for field in msgspec.structs.fields(Options))
    for key in options:
        if key not in known:
            raise ConfigError(f"the shell environment has no option {key!r}{_did_you_mean(key, known)}", field=f"options.{key}")
    families = _families(options.get("families", DEMO_FAMILIES))
    difficulty = options.get("difficulty", Difficulty.EASY)
    if difficulty not in tuple(Difficulty):
        raise ConfigError(f"expected one of {', '.join(Difficulty)}, found {difficulty!a}", field="options.difficulty")
    return Options(families=families, difficulty=Difficulty(str(difficulty)))


def _families(value: object) -> tuple[str, ...]:
    field = "options.families"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"expected a list of families such as [lines, read], found {value!a}", field=field)
    for family in value:
        if family not in FAMILIES:
            raise ConfigError(
                f"there is no family {family!a}{_did_you_mean(str(family), FAMILIES)}; there are: {', '.join(FAMILIES)}", field=field
            )
    if len(set(value)) != len(value):
        raise ConfigError("a family is named twice", field=field)
    return tuple(value)


def _did_you_mean(found: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(found, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
