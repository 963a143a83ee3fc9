"""A file of SWE-bench rows in; frozen records out, or one sentence with file, row and field.

Rows of the 4.x releases name a repository and version, from which the `swebench` package makes the evaluation; rows of 5.x carry it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sandmill.config.check import nearest
from sandmill.errors import ConfigError

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_TEXTS: Final = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "version")
_LISTS: Final = ("FAIL_TO_PASS", "PASS_TO_PASS")
_LARGEST_FILE_BYTES: Final = 2 << 30
_SUFFIXES: Final = (".jsonl", ".json", ".parquet")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. The last four are of 5.x; empty ones are made by the package."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    version: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image: str = ""
    log_parser: str = ""
    eval_type: str = ""
    eval_script: str = ""


def read_rows(path: Path) -> tuple[Row, ...]:
    """All rows. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError("there is no such file; give rows as .jsonl, .json or .parquet", file=str(path))
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"rows are read from {', '.join(_SUFFIXES)}, not from {path.suffix[:20]!r}", file=str(path))
    if path.stat().st_size > _LARGEST_FILE_BYTES:
        raise ConfigError(f"it has more than {_LARGEST_FILE_BYTES} bytes", file=str(path))
    rows = tuple(_row(found, path, number) for number, found in enumerate(_values(path)))
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        if row.instance_id in seen:
            raise ConfigError(f"row {number}: {row.instance_id!r} is row {seen[row.instance_id]} too", file=str(path), field="instance_id")
        seen[row.instance_id] = number
    if not rows:
        raise ConfigError("it has no row", file=str(path))
    return rows


def _values(path: Path) -> list[object]:
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".json":
            found = json.loads(text)
            return found if isinstance(found, list) else [found]
        return [_line(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is no {path.suffix[1:]}: {error}", file=str(path)) from None


def _line(number: int, line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from None


def _parquet(path: Path) -> list[object]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError("parquet needs pyarrow: pip install 'sandmill[environments]'", file=str(path)) from None
    try:
        return list(parquet.read_table(path).to_pylist())
    except Exception as error:
        raise ConfigError(f"it is no parquet: {type(error).__name__}", file=str(path)) from error


def _row(found: object, path: Path, number: int) -> Row:
    if not isinstance(found, Mapping):
        raise ConfigError(f"row {number} is no object but {ascii(found)[:60]}", file=str(path))
    texts = {name: _text(found, name, path, number) for name in _TEXTS}
    if not _ID.fullmatch(texts["instance_id"]):
        raise ConfigError(f"row {number}: {texts['instance_id'][:80]!r} is no plain name", file=str(path), field="instance_id")
    newer = {name: str(found.get(name) or "") for name in ("image", "log_parser", "eval_type", "eval_script")}
    if newer["eval_type"] not in ("", "pass_and_fail", "fail_only"):
        near = nearest(newer["eval_type"], ("pass_and_fail", "fail_only")) or "pass_and_fail"
        raise ConfigError(
            f"row {number}: there is no {newer['eval_type'][:40]!r}; the nearest is {near}", file=str(path), field="eval_type"
        )
    lists = [_tests(found, name, path, number) for name in _LISTS]
    if not lists[0]:
        raise ConfigError(f"row {number} names no test that has to pass, so nothing could be graded", file=str(path), field="FAIL_TO_PASS")
    return Row(**texts, fail_to_pass=lists[0], pass_to_pass=lists[1], **newer)


def _text(found: Mapping[Any, Any], name: str, path: Path, number: int) -> str:
    value = found.get(name)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str) or (not value and name != "version"):
        near = nearest(name, [str(key) for key in found if key != name])
        hint = f"; the row has {near!r}" if name not in found and near else ""
        raise ConfigError(f"row {number} has no text there{hint}", file=str(path), field=name)
    return value


def _tests(found: Mapping[Any, Any], name: str, path: Path, number: int) -> tuple[str, ...]:
    value = found.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"row {number}: it is text, but no JSON list", file=str(path), field=name) from None
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f"row {number} has no list of test names there", file=str(path), field=name)
    return tuple(value)
