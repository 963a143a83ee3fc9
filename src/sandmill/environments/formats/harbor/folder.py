"""A task's folder in; its instruction, tests, solution and limits out, all of it read once. Or one sentence with file and field.

    task.toml  instruction.md  environment/  tests/test.sh  solution/solve.sh  steps/<name>/{instruction.md,tests,solution,workdir}

Nothing in it is trusted: links are refused, since one could lead to a file of this machine. The older layout is read by `legacy`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from sandmill.config.check import nearest
from sandmill.environments.formats.harbor.tables import Artifact, Box, Healthcheck, Step, TaskFile, Verifier, read_task_file
from sandmill.environments.verifying.verify import check_take
from sandmill.errors import ConfigError

Files = Mapping[str, tuple[int, bytes]]
"""Relative path -> (permissions, contents)."""
TASK_FILE: Final = "task.toml"
_ENTRIES: Final = frozenset(
    {TASK_FILE, "instruction.md", "environment", "tests", "solution", "steps", "README.md", "trajectory.json", "LICENSE", ".gitignore"}
)
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_LARGEST_FOLDER_BYTES: Final = 64 << 20
_CANARY: Final = re.compile(r"\s*(?:<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)
_LONGEST_INSTRUCTION: Final = 1 << 20


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a task; a task without steps is one."""

    name: str
    instruction: str
    tests: Files
    solution: Files
    workdir: Files
    """What is laid into the workdir before the step; its `setup.sh`, if any, is run then."""
    verifier: Verifier
    min_reward: Mapping[str, float] = {}
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `script`: the verifier, below /tests. `by_sessions`: graded by what its pytest sessions came to, not by reward files."""

    id: str
    name: str
    path: str
    script: str
    solve: str
    stages: tuple[Stage, ...]
    box: Box
    agent_user: str
    agent_timeout_s: float | None
    """For all steps together, where every step has a limit."""
    agent_network: tuple[str, tuple[str, ...]]
    """Mode and host names of the agent's network, used where the options say so."""
    strategy: str
    solution_env: Mapping[str, str]
    dockerfile: str | None
    context: str
    separate_dockerfile: str | None = None
    by_sessions: bool = False


def task_id(folder: Path) -> str:
    """A folder's name as a task's id. Raises ConfigError for one that is no plain name."""
    if not _ID.fullmatch(folder.name):
        raise ConfigError(
            f"{folder.name[:80]!r} is no name for a task: letters, digits and . _ - only, at most 120", file=str(folder.parent)
        )
    return folder.name


def read_folder(folder: Path) -> Folder:
    """The task of the present layout in `folder`. Raises ConfigError."""
    file = str(folder / TASK_FILE)
    found = read_task_file(folder / TASK_FILE)
    _check_entries(folder)
    dockerfile = _dockerfile(folder, found, file)
    stages = tuple(_step(folder, found, step) for step in found.steps) or (_whole(folder, found),)
    for stage in stages:
        for artifact in stage.artifacts:
            check_take(artifact.source, f"{file}: artifacts")
    separate = folder / "tests" / "Dockerfile"
    return Folder(
        id=task_id(folder),
        name=found.task.name or folder.name,
        path=str(folder),
        script="test.sh",
        solve="solve.sh",
        stages=stages,
        box=found.environment,
        agent_user=found.agent.user,
        agent_timeout_s=_agents_time(found),
        agent_network=_agents_network(found),
        strategy=found.multi_step_reward_strategy,
        solution_env=found.solution.env,
        dockerfile=dockerfile,
        context=str(folder / "environment"),
        separate_dockerfile=text_of(separate) if found.verifier.environment_mode == "separate" and separate.is_file() else None,
    )


def _agents_network(found: TaskFile) -> tuple[str, tuple[str, ...]]:
    said = found.agent if found.agent.network_mode else found.environment
    return said.network_mode, said.allowed_hosts


def _agents_time(found: TaskFile) -> float | None:
    limits = [step.agent.timeout_sec or found.agent.timeout_sec for step in found.steps] or [found.agent.timeout_sec]
    known = [limit for limit in limits if limit is not None]
    return sum(known) if len(known) == len(limits) else None


def _check_entries(folder: Path) -> None:
    for entry in sorted(os.listdir(folder)):
        if entry not in _ENTRIES and not entry.startswith(".") and not entry.endswith((".md", ".txt")):
            near = nearest(entry, _ENTRIES)
            hint = f"; did you mean {near!r}?" if near else f"; a task has {', '.join(sorted(_ENTRIES))}"
            raise ConfigError(f"{entry[:80]!r} is nothing that a task's folder has{hint}", file=str(folder))


def _dockerfile(folder: Path, found: TaskFile, file: str) -> str | None:
    place = folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (place / name).is_file() and not (place / "Dockerfile").is_file():
            raise ConfigError("tasks of several containers cannot be run; the nearest is one Dockerfile", file=str(place / name))
    if (place / "Dockerfile").is_file():
        return text_of(place / "Dockerfile")
    if not found.environment.docker_image:
        raise ConfigError("there is neither environment/Dockerfile nor docker_image", file=file, field="environment")
    return None


def _whole(folder: Path, found: TaskFile) -> Stage:
    tests = read_files(folder / "tests")
    check_script(folder / "tests", tests, "test.sh")
    return Stage(
        name="",
        instruction=instruction_of(folder / "instruction.md"),
        tests=tests,
        solution=read_files(folder / "solution", missing_ok=True),
        workdir={},
        verifier=found.verifier,
        healthcheck=found.environment.healthcheck,
        artifacts=found.artifacts,
    )


def _step(folder: Path, found: TaskFile, step: Step) -> Stage:
    place = folder / "steps" / step.name
    if not place.is_dir() or place.is_symlink():
        names = sorted(os.listdir(folder / "steps")) if (folder / "steps").is_dir() else []
        near = nearest(step.name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"there is no folder steps/{step.name}{hint}", file=str(folder / TASK_FILE), field="steps.name")
    tests = {**read_files(folder / "tests", missing_ok=True), **read_files(place / "tests", missing_ok=True)}
    check_script(place / "tests", tests, "test.sh")
    return Stage(
        name=step.name,
        instruction=instruction_of(place / "instruction.md"),
        tests=tests,
        solution=read_files(place / "solution", missing_ok=True),
        workdir=read_files(place / "workdir", missing_ok=True),
        verifier=step.verifier or found.verifier,
        min_reward=step.min_reward,
        healthcheck=step.healthcheck or found.environment.healthcheck,
        artifacts=(*found.artifacts, *step.artifacts),
    )


def check_script(place: Path, tests: Files, script: str) -> None:
    """Raises ConfigError when there is no verifier among the tests."""
    if script not in tests:
        near = nearest(script, tests)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"there is no {script} in it, so nothing could be graded{hint}", file=str(place))


def instruction_of(path: Path) -> str:
    """The instruction, without the canary lines that it begins with. Raises ConfigError."""
    text = text_of(path)
    lines = text.splitlines()
    while lines and (_CANARY.fullmatch(lines[0]) or (len(lines) < len(text.splitlines()) and not lines[0].strip())):
        lines.pop(0)
    stripped = "\n".join(lines).strip()
    if not stripped or len(stripped) > _LONGEST_INSTRUCTION:
        raise ConfigError(f"an instruction has 1 to {_LONGEST_INSTRUCTION} characters, this one {len(stripped)}", file=str(path))
    return stripped


def text_of(path: Path) -> str:
    """A file's text. Raises ConfigError."""
    mode_and_data = _read(path)
    try:
        return mode_and_data[1].decode("utf-8")
    except UnicodeError as error:
        raise ConfigError("it is no text", file=str(path)) from error


def read_files(folder: Path, *, missing_ok: bool = False) -> dict[str, tuple[int, bytes]]:
    """Everything below `folder`. Raises ConfigError for what is no plain file, and when it is too much."""
    if folder.is_symlink() or not folder.is_dir():
        if missing_ok and not os.path.lexists(folder):
            return {}
        raise ConfigError("there is no such folder", file=str(folder))
    found: dict[str, tuple[int, bytes]] = {}
    size = 0
    for above, folders, names in os.walk(folder):
        folders.sort()
        for name in folders:
            if (Path(above) / name).is_symlink():
                raise ConfigError("it is a link; a task's files are plain ones", file=str(Path(above) / name))
        for name in sorted(names):
            path = Path(above) / name
            found[os.path.relpath(path, folder)] = _read(path)
            size += len(found[os.path.relpath(path, folder)][1])
            if size > _LARGEST_FOLDER_BYTES:
                raise ConfigError(f"it holds more than {_LARGEST_FOLDER_BYTES} bytes; put large files into the image", file=str(folder))
    return found


def _read(path: Path) -> tuple[int, bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a link; a task's files are plain ones" if path.is_symlink() else f"it cannot be read: {error.strerror}"
        raise ConfigError(reason, file=str(path)) from error
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError("it is no plain file", file=str(path))
        return 0o755 if info.st_mode & 0o100 else 0o644, file.read(_LARGEST_FOLDER_BYTES + 1)
