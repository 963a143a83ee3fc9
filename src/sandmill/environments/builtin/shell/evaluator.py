"""The six demonstration commands, evaluated in-process: a command line and files in, what bash would print and its exit code out.

Only for scripted demonstrations, whose commands we write ourselves: an agent's commands run in a sandbox and nowhere else. A test
compares every output and exit code with the real tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

AWK_SUM = "awk '{s+=$2}END{print s}' "


class Evaluation(NamedTuple):
    """What the command printed (standard output, then standard error) and its exit code."""

    output: str
    exit_code: int


def evaluate(script: str, files: Mapping[str, str]) -> Evaluation:
    """Evaluates one of the six commands on plain words, numbers and file names. Raises ValueError for any other script."""
    if script == "ls | wc -l":
        return Evaluation(f"{len(files)}\n", 0)
    if script.startswith(AWK_SUM):
        return _sum(script.removeprefix(AWK_SUM), files)
    match script.split(" "):
        case ["wc", "-l", name]:
            return _count(name, files)
        case ["grep", key, name]:
            return _grep(key, name, files)
        case ["cat", name]:
            return Evaluation(files[name], 0) if name in files else _missing("cat", name)
        case ["tail", "-n", "1", name]:
            return _tail(name, files)
        case _:
            raise ValueError(f"not one of the demonstration commands: {script!r}")


def _count(name: str, files: Mapping[str, str]) -> Evaluation:
    if name not in files:
        return _missing("wc", name)
    return Evaluation(f"{files[name].count(chr(10))} {name}\n", 0)


def _grep(key: str, name: str, files: Mapping[str, str]) -> Evaluation:
    if name not in files:
        return _missing("grep", name, 2)
    hits = [line for line in files[name].splitlines(keepends=True) if key in line]
    return Evaluation("".join(hits), 0 if hits else 1)


def _tail(name: str, files: Mapping[str, str]) -> Evaluation:
    if name not in files:
        return Evaluation(f"tail: cannot open '{name}' for reading: No such file or directory\n", 1)
    return Evaluation(files[name].splitlines(keepends=True)[-1], 0)


def _sum(name: str, files: Mapping[str, str]) -> Evaluation:
    if name not in files:
        return Evaluation(f"awk: cannot open {name} (No such file or directory)\n", 2)
    total = 0
    for line in files[name].splitlines():
        columns = line.split()
        if len(columns) > 1 and columns[1].isdecimal():
            total += int(columns[1])
    return Evaluation(f"{total}\n", 0)


def _missing(tool: str, name: str, exit_code: int = 1) -> Evaluation:
    return Evaluation(f"{tool}: {name}: No such file or directory\n", exit_code)
