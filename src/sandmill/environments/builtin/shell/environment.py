"""`shell@1.0.0`: questions about generated folders, to be answered with one to four bash commands.

Reward: 1.0 when solved, plus 0.1 when a command ended with exit code 0 and an answer was given (or the graded file exists). A right
answer without a command that worked is a guess and counts as not solved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.builtin.shell.demonstrator import demonstrations
from sandmill.environments.builtin.shell.generate import problems
from sandmill.environments.builtin.shell.hidden import passes_hidden_runs
from sandmill.environments.builtin.shell.lexicon import vocabulary
from sandmill.environments.builtin.shell.options import Options, parse_options
from sandmill.environments.builtin.shell.problem import Problem
from sandmill.environments.builtin.shell.words import SPLITS
from sandmill.environments.demonstration import Demonstration
from sandmill.environments.environment import Artifacts
from sandmill.environments.task import Graded, NoAnswer, Submission, Task, Verdict
from sandmill.environments.tools import BASH, Tool
from sandmill.errors import SandboxFileError
from sandmill.sandboxes import Sandbox, SandboxSpec

SOLVED_REWARD = 1.0
WORKED_REWARD = 0.1
LARGEST_RESULT_BYTES = 64 * 1024


class ShellEnvironment:
    """The built-in family. All tasks, files and answers derive from the section; see `words` and `phrasings` for who sees what."""

    name = "shell"
    version = "1.0.0"
    tools: tuple[Tool, ...] = (BASH,)

    def __init__(self, section: EnvironmentSection) -> None:
        self.options: Options = parse_options(section.options)
        self._seed = section.seed
        self._sizes = {split: section.train_tasks if split == "train" else section.held_out_tasks for split in SPLITS}

    @cached_property
    def _problems(self) -> Mapping[str, Mapping[str, Problem]]:
        return {
            split: {f"shell-{split}-{index:05d}": problem for index, problem in problems(self.options, split, size, self._seed)}
            for split, size in self._sizes.items()
        }

    @cached_property
    def _by_id(self) -> Mapping[str, Problem]:
        return {task_id: problem for split in self._problems.values() for task_id, problem in split.items()}

    @cached_property
    def digest(self) -> str:
        """sha256 over every task, file and expected result, and the version that stands for the grading rules."""
        digest = hashlib.sha256(f"{self.name}@{self.version}:{self._seed}:{self.options}".encode())
        for task_id, problem in self._by_id.items():
            digest.update(f"{task_id}:{problem}".encode())
        return digest.hexdigest()

    @property
    def sandbox(self) -> SandboxSpec:
        """What an episode's sandbox needs: nothing beyond the defaults, and no network."""
        return SandboxSpec()

    @cached_property
    def splits(self) -> Mapping[str, Sequence[Task]]:
        """`train`, `tuning`, `heldout` and `unseen`. Metadata: `family`, `difficulty`, `split`, `commands` (the solution's length)."""
        return {
            split: tuple(self._task(split, task_id, problem) for task_id, problem in mine.items()) for split, mine in self._problems.items()
        }

    def _task(self, split: str, task_id: str, problem: Problem) -> Task:
        metadata = {
            "family": problem.family,
            "difficulty": str(self.options.difficulty),
            "split": split,
            "commands": str(len(problem.solution)),
        }
        return Task(id=task_id, prompt=problem.prompt, identity=problem.identity, metadata=metadata)

    def files(self, task: Task) -> Mapping[str, bytes]:
        """The folder that the question is about."""
        return {name: text.encode() for name, text in self._by_id[task.id].files.items()}

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        """Nothing beyond `files`."""

    async def collect(self, task: Task, sandbox: Sandbox) -> Artifacts:
        """The file that is graded, where the family has one; absent when it cannot be read or is longer than 64 KiB."""
        name = self._by_id[task.id].result_file
        if not name:
            return {}
        try:
            return {name: await sandbox.read.aio(name, max_bytes=LARGEST_RESULT_BYTES)}
        except SandboxFileError:
            return {}

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """Compares the answer and the resulting file; a mended script is run in a fresh sandbox on inputs nobody has seen."""
        problem = self._by_id[task.id]
        worked = any(command.exit_code == 0 for command in submission.commands)
        delivered = submission.answer is not None if problem.answer is not None else problem.result_file in artifacts
        if submission.answer is None and submission.limit is None and not delivered:
            return NoAnswer(reward=0.0)
        solved = worked and answered(problem, submission.answer) and await self._result_right(problem, artifacts)
        parts = {"solved": SOLVED_REWARD if solved else 0.0, "worked": WORKED_REWARD if worked and delivered else 0.0}
        return Graded(reward=sum(parts.values()), passed=solved, parts=parts)

    async def _result_right(self, problem: Problem, artifacts: Artifacts) -> bool:
        if not problem.result_file:
            return True
        content = artifacts.get(problem.result_file)
        if content is None:
            return False
        if problem.expected_result is not None:
            return content.strip() == problem.expected_result.encode()
        return await passes_hidden_runs(content, problem.hidden_runs)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """An endless stream of the confused demonstrator's dialogues (see `demonstrator`)."""
        return demonstrations(self.options, self._seed, seed)

    def vocabulary(self) -> tuple[str, ...]:
        """Every word a word-level tokenizer needs, special tokens excluded."""
        return vocabulary()

    def solution(self, task: Task) -> tuple[str, ...]:
        """The reference commands, for checking a machine against them. Never shown to a policy."""
        return self._by_id[task.id].solution

    def expected_answer(self, task: Task) -> str | None:
        """The answer the reference solution ends with. Never shown to a policy."""
        return self._by_id[task.id].answer


def answered(problem: Problem, answer: str | None) -> bool:
    """Whether the final answer is right: whitespace, quotes and one full stop around it do not matter."""
    if problem.answer is None:
        return True
    return answer is not None and answer.strip().removesuffix(".").strip("`'\" ") == problem.answer
