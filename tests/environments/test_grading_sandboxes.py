"""Grading with real sandboxes: who is dead, what is read, what a lost sandbox means."""

import asyncio

import pytest

from sandmill.environments.grading import grade_episode
from sandmill.environments.health import GraderHealth
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure, Submission, Task
from sandmill.sandboxes import Sandbox, loop

TASK = Task(id="t", prompt="?", identity="i")


class Own:
    """Grades the bytes of one file."""

    name, version, digest = "own", "1", "d"

    def __init__(self, path="result.txt", max_bytes=1000):
        self.path = path
        self.max_bytes = max_bytes

    async def collect(self, task, sandbox):
        return {self.path: await sandbox.read.aio(self.path, max_bytes=self.max_bytes)}

    async def grade(self, task, submission, artifacts):
        return Graded(reward=float(len(artifacts[self.path])), passed=True)


def after(script, environment=None, *, end=False, health=None):
    """The verdict on a sandbox where `script` ran."""

    async def main():
        sandbox = await Sandbox.create.aio(memory="64Mi", disk="16Mi")
        try:
            await sandbox.run.aio("bash", "-c", script, timeout=10.0)
            if end:
                await sandbox.terminate.aio()
            return await grade_episode(environment or Own(), TASK, Submission(answer=None), sandbox, timeout_s=10.0, health=health)
        finally:
            await sandbox.terminate.aio()

    return asyncio.run_coroutine_threadsafe(main(), loop()).result(60)


def test_resulting_files_are_graded():
    assert after("printf four > result.txt") == Graded(reward=4.0, passed=True)


def test_nothing_of_the_agent_runs_while_its_files_are_read():
    """A fork bomb of writers that would keep changing the file."""

    class Watching(Own):
        async def collect(self, task, sandbox):
            before = await sandbox.read.aio(self.path)
            await asyncio.sleep(0.3)
            return {self.path: b"" if await sandbox.read.aio(self.path) == before else b"changed"}

    script = "for i in $(seq 20); do setsid nohup bash -c 'while :; do echo $RANDOM >> result.txt; done' > /dev/null 2>&1 & done; sleep 0.2"
    assert after(script, Watching()) == Graded(reward=0.0, passed=True)


def test_a_sandbox_that_is_gone_is_an_infrastructure_failure_and_the_grader_is_not_called():
    health = GraderHealth()
    verdict = after("true", end=True, health=health)
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.retryable) == (Boundary.SANDBOX_LOST, True)
    assert "is gone: terminated" in verdict.reason
    assert (health.episodes, health.calls, health.failures) == (1, 0, 0)


@pytest.mark.parametrize(
    "script",
    ["true", "mkdir result.txt", "mkfifo result.txt", "ln -s /proc/self/mem result.txt", "head -c 2000 /dev/zero > result.txt"],
)
def test_what_the_agent_does_to_its_files_never_hangs_grading_or_passes_for_a_lost_sandbox(script):
    """This `collect` lets the error fly, which is a mistake of the environment's; the agent must not gain an exclusion by it unseen."""
    verdict = after(script)
    assert isinstance(verdict, InfrastructureFailure)
    assert verdict.boundary is Boundary.GRADER
    assert "must be an absent key" in verdict.reason
