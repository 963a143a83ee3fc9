"""What both sides of the training benchmark do: model, tasks, group shape and reward. In: a JSON file; out: the same objects for each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.environment import Artifacts
from sandmill.environments.task import Submission, Task, Verdict
from sandmill.training.curriculum import tasks_of_step

SPREAD = "shell-spread@1.0.0"
TASK = "shell@1.0.0"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One side's orders. `measured` steps follow `warm_up` steps that do not count."""

    folder: str
    reward: str
    batch_size: int
    num_generations: int
    max_completion_length: int
    max_turns: int
    micro_batch_size: int
    peer_micro_batch_size: int
    """Each side gets the split that is fastest for it."""
    learning_rate: float
    top_layers: int | None
    warm_up: int
    measured: int
    train_tasks: int
    dialogue: str = "line"
    context_length: int | None = None
    max_observation: int = 2000
    """Characters of a command's output that the model sees."""
    seed: int = 0
    threads: int | None = None
    lora_r: int = 16
    lora_alpha: float = 32.0

    @property
    def steps(self) -> int:
        return self.warm_up + self.measured

    @property
    def section(self) -> EnvironmentSection:
        return EnvironmentSection(name=self.reward, train_tasks=self.train_tasks, held_out_tasks=16)

    def tasks(self, environment: ShellEnvironment) -> list[Task]:
        """The tasks of all steps, in the order in which Sandmill takes them."""
        train = environment.splits["train"]
        return [task for step in range(self.steps) for _, task in tasks_of_step(train, step, batch_size=self.batch_size, seed=self.seed)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One side's figures, one entry per measured step."""

    side: str
    seconds: tuple[float, ...]
    sampled_tokens: tuple[int, ...]
    trained_share: tuple[float, ...]
    """Sampled tokens that had a gradient, over all sampled tokens."""
    turns: tuple[int, ...]
    commands: tuple[int, ...]
    peak_rss_bytes: int
    parts: dict[str, float] = {}
    """Median seconds by part, where the side tells them."""


class SpreadEnvironment(ShellEnvironment):
    """The shell tasks with a reward that differs within every group, so that every sampled token is trained on, on either side."""

    def __init__(self, section: EnvironmentSection) -> None:
        super().__init__(section)
        self._random = random.Random(section.seed)

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        return msgspec.structs.replace(await super().grade(task, submission, artifacts), reward=self._random.random())


def register() -> None:
    """Makes the environment of this benchmark known by its name, graded in this process like the built-in one."""
    known: dict[str, Any] = {**registry.BUILTIN, SPREAD: SpreadEnvironment}
    registry.BUILTIN = known


def read(path: str) -> Workload:
    return msgspec.json.decode(Path(path).read_bytes(), type=Workload)
