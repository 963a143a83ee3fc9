"""The older layout of Terminal-Bench in; the same record as of the present one out.

    task.yaml  Dockerfile  docker-compose.yaml  run-tests.sh  solution.sh|solution.yaml  tests/

It has no reward files: a task is solved when every test of every pytest session passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sandmill.config.check import locate
from sandmill.config.document import Node, parse_document
from sandmill.environments.formats.harbor.folder import Folder, Stage, check_script, read_files, task_id, text_of
from sandmill.environments.formats.harbor.tables import Box, Seconds, Table, Verifier
from sandmill.environments.formats.records import checked
from sandmill.errors import ConfigError

TASK_FILE: Final = "task.yaml"
PARSERS: Final = ("pytest",)
_FREE: Final = ("difficulty", "category", "tags", "author_name", "author_email", "descriptions", "estimated_duration_sec",
                "expert_time_estimate_min", "junior_time_estimate_min", "max_episodes", "disable_asciinema", "canary")  # fmt: skip
"""Keys that say nothing about how a task runs."""


class OldTaskFile(Table, frozen=True):
    """A task.yaml."""

    instruction: str
    parser_name: str = "pytest"
    max_agent_timeout_sec: Seconds = 360.0
    max_test_timeout_sec: Seconds = 60.0
    run_tests_in_same_shell: bool = False


class TypedCommand(Table, frozen=True):
    """One entry of a solution.yaml."""

    command: str
    min_timeout_sec: float = 0.0
    max_timeout_sec: float = 0.0
    block: bool = False
    append_enter: bool = True


class Typed(Table, frozen=True):
    """A solution.yaml, under one key."""

    commands: tuple[TypedCommand, ...]


def read_old_folder(folder: Path) -> Folder:
    """The task in `folder`. Raises ConfigError with file, line and field."""
    file = folder / TASK_FILE
    document = parse_document(text_of(file).encode(), str(file))
    found = checked(_without(document, _FREE), OldTaskFile)
    if found.parser_name not in PARSERS:
        line = locate(document, "parser_name").line
        raise ConfigError(
            f"there is no parser {found.parser_name[:60]!r}; the nearest is pytest", file=str(file), line=line, field="parser_name"
        )
    _check_services(folder)
    tests = {**read_files(folder / "tests", missing_ok=True), "run-tests.sh": _script(folder / "run-tests.sh")}
    check_script(folder, tests, "run-tests.sh")
    stage = Stage(
        name="",
        instruction=_instruction(found.instruction, file),
        tests=tests,
        solution=_solution(folder),
        workdir={},
        verifier=Verifier(timeout_sec=found.max_test_timeout_sec, env={"TEST_DIR": "/tests"}),
    )
    return Folder(
        id=task_id(folder),
        name=folder.name,
        path=str(folder),
        script="run-tests.sh",
        solve="solution.sh",
        stages=(stage,),
        box=Box(),
        agent_user="",
        agent_timeout_s=found.max_agent_timeout_sec,
        agent_network=("", ()),
        strategy="final",
        solution_env={},
        dockerfile=text_of(folder / "Dockerfile"),
        context=str(folder),
        by_sessions=True,
    )


def _without(node: Node, keys: tuple[str, ...]) -> Node:
    if not isinstance(node.value, dict):
        return node
    return Node({key: value for key, value in node.value.items() if key not in keys}, node.text, node.file, node.line, node.key_lines)


def _check_services(folder: Path) -> None:
    """One container, named client: more cannot be run."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        path = folder / name
        if not path.is_file():
            continue
        node = parse_document(text_of(path).encode(), str(path))
        services = node.value.get("services") if isinstance(node.value, dict) else None
        names = list(services.value) if services is not None and isinstance(services.value, dict) else []
        if len(names) > 1:
            raise ConfigError(f"tasks of several containers ({', '.join(names)[:80]}) cannot be run", file=str(path), field="services")


def _script(path: Path) -> tuple[int, bytes]:
    return 0o755, text_of(path).encode()


def _instruction(text: str, file: Path) -> str:
    if not text.strip():
        raise ConfigError("it is empty", file=str(file), field="instruction")
    return text.strip()


def _solution(folder: Path) -> Mapping[str, tuple[int, bytes]]:
    """solution.sh, or the typed commands of solution.yaml as one script."""
    if (folder / "solution.sh").is_file():
        return {"solution.sh": _script(folder / "solution.sh")}
    path = folder / "solution.yaml"
    if not path.is_file():
        return {}
    listed = parse_document(text_of(path).encode(), str(path))
    typed = checked(Node({"commands": listed}, "", str(path), 1, {}), Typed)
    return {"solution.sh": (0o755, ("#!/bin/bash\n" + "\n".join(one.command for one in typed.commands) + "\n").encode())}


__all__ = ["TASK_FILE", "OldTaskFile", "read_old_folder"]
