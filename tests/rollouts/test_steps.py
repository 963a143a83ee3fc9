"""Tasks with sandboxes of their own and several steps, in the real runner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import playground as pg

from sandmill.environments.task import AgentLimited, Boundary, Graded, InfrastructureFailure, Limit, Submission, Task, Verdict
from sandmill.errors import GraderFailed
from sandmill.rollouts.episode import Place, attempt
from sandmill.rollouts.trajectory import Episode
from sandmill.sandboxes import Sandbox, SandboxSpec

PLACE = Place(group="g", index=0)
TASK = Task(id="t", prompt="hello", identity="i")
TURNS = ["$ echo hello > hello", "= none", "$ cat hello", "= none"]


class Steps:
    """Two steps in a sandbox of the task's own; graded by what is in it."""

    name, version, digest = "steps", "1.0.0", "d"
    sandbox = SandboxSpec()
    splits: Mapping[str, Sequence[Task]] = {"train": (TASK,), "heldout": ()}

    def __init__(self, fail_at: str = "") -> None:
        self.said = 0
        self.fail_at = fail_at
        self.agent_s: float | None = None
        self.checking_s = 0.0

    def files(self, task: Task) -> Mapping[str, bytes]:
        return {}

    async def sandbox_for(self, task: Task) -> SandboxSpec:
        return SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20, workdir="/own", env={"KIND": self.fail_at})

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        pass

    async def collect(self, task: Task, sandbox: Sandbox) -> Mapping[str, bytes]:
        raise AssertionError("nothing is collected")

    async def grade(self, task: Task, submission: Submission, artifacts: Mapping[str, bytes]) -> Verdict:
        raise AssertionError("graded by the sandbox")

    async def next_message(self, task: Task, submission: Submission, sandbox: Sandbox) -> str | None:
        if self.fail_at == "between":
            raise GraderFailed("the first step's verifier wrote nothing")
        await asyncio.sleep(self.checking_s)
        self.said += 1
        return "hello" if self.said == 1 else None

    def grading_timeout_s(self, task: Task) -> float:
        return 10.0

    def agent_timeout_s(self, task: Task) -> float | None:
        return self.agent_s

    async def grade_sandbox(self, task: Task, submission: Submission, sandbox: Sandbox | None) -> Verdict:
        left = [] if sandbox is None else [entry.name for entry in await sandbox.list.aio("/own")]
        return Graded(reward=float(len(left)), passed=self.said == 2)


def played(environment: Steps, turns: Sequence[str], **limits: object) -> Episode:
    async def go() -> Episode:
        async with pg.arena(environment, pg.play(turns), {"g": TASK}, **limits) as arena:
            return await attempt(arena, TASK, PLACE, pg.SAMPLING)

    return pg.run(go())


def test_an_answer_ends_a_step_and_the_next_instruction_follows_in_the_same_sandbox() -> None:
    episode = played(Steps(), TURNS)
    assert episode.verdict == Graded(reward=1.0, passed=True)
    assert [command.exit_code for command in episode.trajectory.commands] == [0, 0]
    assert episode.trajectory.commands[1].output == "hello\n"
    assert [who for who, _ in episode.trajectory.text] == ["task", "model", "tool", "model", "tool", "model", "tool", "model"]
    assert episode.trajectory.answer == "none"


def test_limits_hold_over_all_steps() -> None:
    episode = played(Steps(), TURNS, max_turns=3)
    assert episode.verdict == AgentLimited(limit=Limit.TURNS, reward=1.0, passed=False)


def test_the_tasks_own_limit_holds_where_it_is_shorter() -> None:
    environment = Steps()
    environment.agent_s = 0.5
    verdict = played(environment, ["$ sleep 5"]).verdict
    assert verdict == AgentLimited(limit=Limit.TIME, reward=0.0, passed=False)


def test_what_checking_a_step_takes_is_not_the_agents_time() -> None:
    environment = Steps()
    environment.agent_s, environment.checking_s = 4.0, 2.5
    assert played(environment, TURNS).verdict == Graded(reward=1.0, passed=True)


def test_a_grader_that_fails_between_steps_is_a_failure_at_its_boundary() -> None:
    verdict = played(Steps("between"), TURNS).verdict
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.retryable) == (Boundary.GRADER, False)
    assert verdict.reason == "the first step's verifier wrote nothing"


def test_an_episode_without_a_command_is_graded_without_a_sandbox_of_its_own_making() -> None:
    environment = Steps()
    environment.said = 1
    assert played(environment, ["= none"]).verdict == Graded(reward=0.0, passed=True)
