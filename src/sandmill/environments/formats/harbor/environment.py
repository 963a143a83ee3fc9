"""`harbor/PATH`: task folders as an environment. In: a folder of task folders (or one), both layouts. Out: tasks, sandboxes, verdicts.

The reward is what the task's own verifier wrote, in a sandbox that the agent never was in (see `verifying`). What the agent did outside its
workdir, declared artifacts and option `take` is not taken over, and recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import posixpath
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.confusion import RIGHT, confused
from sandmill.environments.demonstration import Demonstration
from sandmill.environments.environment import Artifacts
from sandmill.environments.formats.harbor import legacy
from sandmill.environments.formats.harbor.folder import TASK_FILE, Folder, Stage, read_folder, task_id
from sandmill.environments.formats.harbor.images import Images
from sandmill.environments.formats.harbor.options import parse_options
from sandmill.environments.formats.harbor.rewards import Rewards, combined, scalar
from sandmill.environments.formats.harbor.sandboxes import agent_spec, lay, wait_healthy
from sandmill.environments.formats.harbor.verdicts import verified
from sandmill.environments.handover import Cheat
from sandmill.environments.observe import NOTHING
from sandmill.environments.splits import draw, kept
from sandmill.environments.task import Graded, Submission, Task, Verdict
from sandmill.environments.verifying.cheats import CHEATS
from sandmill.environments.verifying.verify import Findings, root
from sandmill.errors import ConfigError, EnvironmentFailed, GraderFailed
from sandmill.sandboxes import Sandbox, SandboxSpec

_OVERHEAD_S: Final = 180.0
"""For a grading sandbox, its files and, the first time, its image."""
_SOLVE_S: Final = 600.0
_SHOWN: Final = 600


class _Progress(msgspec.Struct):
    """How far one sandbox's task has come: `done` holds the rewards of the steps that were verified."""

    step: int = 0
    done: list[dict[str, float]] = []
    over: bool = False


class HarborEnvironment:
    """See the module. `place`: a folder with a task.toml or task.yaml, or one with such folders in it."""

    version = "1.0.0"
    sandbox = SandboxSpec()

    def __init__(self, place: str, section: EnvironmentSection) -> None:
        self.options = parse_options(section.options)
        self._section = section
        self._folders = kept({one.id: one for one in _read_all(Path(place).expanduser())}, section)
        self.name = f"harbor/{Path(place).expanduser().resolve().name}"
        self._images = Images(self.options)
        self._progress: weakref.WeakKeyDictionary[Sandbox, _Progress] = weakref.WeakKeyDictionary()
        self._outside: dict[str, tuple[str, ...]] = {}
        self._turns: asyncio.Semaphore | None = None

    @cached_property
    def digest(self) -> str:
        """sha256 over every task."""
        return hashlib.sha256("".join(self.task_digest(task) for task in self.tasks).encode()).hexdigest()

    def task_digest(self, task: Task) -> str:
        """sha256 over a task's files and limits, and the options that decide its grading."""
        folder, options = self._folders[task.id], self.options
        deciding = msgspec.structs.replace(options, verifiers=1)
        # Where a task lies is no part of what it is.
        plain = msgspec.structs.replace(folder, path="", context="")
        whole = hashlib.sha256(f"harbor 1 {deciding}".encode() + msgspec.msgpack.encode(plain, order="sorted"))
        for path in sorted(Path(folder.context).rglob("*")):
            if path.is_file() and not path.is_symlink():
                whole.update(f"{path.relative_to(folder.context)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        return whole.hexdigest()

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All of them, in the order of their names."""
        return tuple(self._task(task) for task in self._folders.values())

    @cached_property
    def splits(self) -> Mapping[str, Sequence[Task]]:
        """`train` and `heldout`, drawn by the section's seed."""
        return draw(self.tasks, self._section)

    def _task(self, folder: Folder) -> Task:
        metadata = {"steps": str(len(folder.stages)), "layout": "terminal-bench" if folder.by_sessions else "harbor", "name": folder.name}
        return Task(id=folder.id, prompt=folder.stages[0].instruction, identity=folder.name, metadata=metadata)

    def files(self, task: Task) -> Mapping[str, bytes]:
        """None: they are in the task's image."""
        return {}

    def agent_timeout_s(self, task: Task) -> float | None:
        """As the task says."""
        return self._folders[task.id].agent_timeout_s

    async def sandbox_for(self, task: Task) -> SandboxSpec:
        """The task's own limits and image, which is built if it was not."""
        folder = self._folders[task.id]
        return agent_spec(folder, await self._images.of(folder), self.options)

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        """The first step's files, and the task's health check."""
        self._progress[sandbox] = _Progress(done=[])
        await self._begin(task, sandbox, self._folders[task.id].stages[0])

    async def _begin(self, task: Task, sandbox: Sandbox, stage: Stage) -> None:
        if stage.workdir:
            await lay(sandbox, sandbox.spec.workdir, stage.workdir, user="user")
            if "setup.sh" in stage.workdir:
                done = await sandbox.run.aio("bash", "setup.sh", timeout=_SOLVE_S, merge_stderr=True)
                if done.exit_code != 0:
                    raise EnvironmentFailed(f"setup.sh of task {task.id} ended with {done.exit_code}: {_end(done.stdout)}")
        if stage.healthcheck is not None:
            await wait_healthy(sandbox, stage.healthcheck, task.id)

    async def collect(self, task: Task, sandbox: Sandbox) -> Artifacts:
        """Nothing: see `grade_sandbox`."""
        return {}

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """Cannot be done without the agent's sandbox. Raises GraderFailed."""
        raise GraderFailed("task folders are graded by what the agent left in its sandbox")

    def grading_timeout_s(self, task: Task) -> float:
        """The task's own limits for its verifiers, and what it takes to get there."""
        return sum(stage.verifier.timeout_sec + _OVERHEAD_S for stage in self._folders[task.id].stages)

    @contextlib.asynccontextmanager
    async def grading_turn(self) -> AsyncIterator[None]:
        """At most option `verifiers` at once."""
        self._turns = self._turns or asyncio.Semaphore(self.options.verifiers)
        async with self._turns:
            yield

    async def next_message(self, task: Task, submission: Submission, sandbox: Sandbox) -> str | None:
        """The next step's instruction when the present step was good enough; None after the last."""
        progress, stages = self._of(sandbox), self._folders[task.id].stages
        if progress.over or len(stages) == 1:
            return None
        rewards = await self._verified_in_time(task, sandbox, progress.step)
        progress.done.append(rewards)
        progress.over = progress.step + 1 == len(stages) or not _enough(rewards, stages[progress.step].min_reward)
        if progress.over:
            return None
        progress.step += 1
        await self._begin(task, sandbox, stages[progress.step])
        return stages[progress.step].instruction

    async def _verified_in_time(self, task: Task, sandbox: Sandbox, step: int) -> dict[str, float]:
        limit_s = self._folders[task.id].stages[step].verifier.timeout_sec + _OVERHEAD_S
        async with self.grading_turn():
            try:
                async with asyncio.timeout(limit_s):
                    return await self._verified(task, sandbox, step)
            except TimeoutError as error:
                raise GraderFailed(f"the verifier of step {step + 1} did not end within {limit_s:g} s") from error

    async def grade_sandbox(self, task: Task, submission: Submission, sandbox: Sandbox | None) -> Verdict:
        """What the verifiers of all steps wrote, as one number and by name."""
        folder = self._folders[task.id]
        progress = _Progress(done=[]) if sandbox is None else self._of(sandbox)
        done = list(progress.done)
        if not progress.over:
            done.append(await self._verified(task, sandbox, progress.step))
        rewards = combined(done, len(folder.stages), folder.strategy) if len(folder.stages) > 1 else done[0]
        reward = scalar(rewards)
        return Graded(reward=reward, passed=reward >= self.options.pass_at, parts=rewards)

    def _of(self, sandbox: Sandbox) -> _Progress:
        return self._progress.setdefault(sandbox, _Progress(done=[]))

    async def _verified(self, task: Task, sandbox: Sandbox | None, step: int) -> dict[str, float]:
        folder = self._folders[task.id]
        source: Sandbox | SandboxSpec = sandbox if sandbox is not None else await self.sandbox_for(task)
        rewards, findings = await verified(source, folder, folder.stages[step], self._images, self.options)
        self._note(task, findings)
        return rewards

    def _note(self, task: Task, findings: Findings) -> None:
        self._outside[task.id] = findings.outside

    def outside(self, task: Task) -> tuple[str, ...]:
        """What the last graded episode of this task had changed outside what is taken over."""
        return self._outside.get(task.id, ())

    def has_solution(self, task: Task) -> bool:
        """Whether every step has a reference solution."""
        folder = self._folders[task.id]
        return all(folder.solve in stage.solution for stage in folder.stages)

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """The present step's reference solution, as the agent's user. Raises EnvironmentFailed, SandboxError."""
        folder = self._folders[task.id]
        stage = folder.stages[self._of(sandbox).step]
        await lay(sandbox, "/solution", stage.solution, user=root())
        env = {"DEBIAN_FRONTEND": "noninteractive", **folder.solution_env}
        script = posixpath.join("/solution", folder.solve)
        done = await sandbox.run.aio("bash", script, env=env, timeout=_SOLVE_S, merge_stderr=True)
        await sandbox.remove.aio("/solution", recursive=True, user=root())
        if done.timed_out or done.exit_code != 0:
            ended = f"did not end within {_SOLVE_S:g} s" if done.timed_out else f"ended with {done.exit_code}"
            raise EnvironmentFailed(f"the reference solution of task {task.id} {ended}: {_end(done.stdout)}")

    def demonstrations(self, seed: int, right: float = RIGHT) -> Iterator[Demonstration]:
        """How an episode goes, seldom right unless asked for (see `confusion`): a reference solution in one line, and that it is done.

        Raises ConfigError for a training task whose solution is none of commands alone.
        """
        return confused(self.splits["train"], self._shown_solution, seed, right)

    def _shown_solution(self, task: Task) -> tuple[str, ...]:
        folder = self._folders[task.id]
        found = folder.stages[0].solution.get(folder.solve, b"")
        script = found if isinstance(found, bytes) else found[1]
        lines = [
            line.strip()
            for line in script.decode("utf-8", "replace").splitlines()
            if line.strip() and not line.strip().startswith(("#", "set -"))
        ]
        if len(folder.stages) != 1 or not lines or any(line.endswith(("\\", "do", "then", "{")) or "<<" in line for line in lines):
            raise ConfigError(f"the solution of task {task.id} is no list of commands to warm-start on", field="spec.warmStart.steps")
        return (f"$ {' && '.join(lines)}", NOTHING, "= done")

    def cheats(self, task: Task) -> tuple[Cheat, ...]:
        """Those that need nothing but a shell."""
        return CHEATS


def _read_all(place: Path) -> list[Folder]:
    if not place.is_dir():
        raise ConfigError("there is no such folder", file=str(place))
    if any((place / name).is_file() for name in (TASK_FILE, legacy.TASK_FILE)):
        return [_read(place)]
    found = [path for path in sorted(place.iterdir()) if any((path / name).is_file() for name in (TASK_FILE, legacy.TASK_FILE))]
    if not found:
        raise ConfigError(f"neither it nor a folder in it has a {TASK_FILE} or {legacy.TASK_FILE}", file=str(place))
    folders = [_read(path) for path in found]
    names: dict[str, str] = {}
    for folder in folders:
        if folder.name in names:
            raise ConfigError(f"it is named {folder.name!r}, as {names[folder.name]} is", file=folder.path, field="task.name")
        names[folder.name] = folder.path
    return folders


def _read(path: Path) -> Folder:
    task_id(path.resolve())
    return read_folder(path.resolve()) if (path / TASK_FILE).is_file() else legacy.read_old_folder(path.resolve())


def _enough(rewards: Rewards, least: Mapping[str, float]) -> bool:
    """Every named reward reaches its least; `reward` where there is no such name means the one number."""
    return all((scalar(rewards) if name == "reward" else rewards.get(name, 0.0)) >= bound for name, bound in least.items())


def _end(output: bytes) -> str:
    text = output.decode("utf-8", "replace")[-_SHOWN:]
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split()) or "it wrote nothing"
