"""The check of tasks: sound, flaky, broken and forgeable ones are told apart, kept by architecture, and asked for before training."""

import asyncio

import pytest

from sandmill.environments.check import Status, all_tasks, check, failing, recorded, refuse_failing
from sandmill.environments.handover import Cheat
from sandmill.environments.task import Graded, Task
from sandmill.errors import ConfigError, EnvironmentFailed, GraderFailed, SandboxFileError
from sandmill.sandboxes import SandboxSpec, loop


class Own:
    """Graded by a file: `good` passes; what else passes depends on the kind of task."""

    name, version, digest = "own", "1.0.0", "0" * 64
    sandbox = SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20)
    allow_failing = False

    def __init__(self, *kinds):
        self.tasks = tuple(Task(id=kind, prompt="?", identity=kind) for kind in kinds)
        self.splits = {"train": self.tasks, "heldout": ()}
        self.solved = 0

    def files(self, task):
        return {"start": b""}

    async def prepare(self, task, sandbox):
        pass

    async def collect(self, task, sandbox):
        try:
            return {"result": await sandbox.read.aio("result")}
        except SandboxFileError:
            return {}

    async def grade(self, task, submission, artifacts):
        result = artifacts.get("result", b"")
        if task.id == "crashing":
            raise GraderFailed("the grader crashed")
        passed = result == b"good\n" or (task.id == "empty" and not result) or (task.id == "loose" and result == b"cheat\n")
        return Graded(reward=float(passed), passed=passed)

    def has_solution(self, task):
        return task.id != "unsolved"

    async def solve(self, task, sandbox):
        self.solved += 1
        if task.id == "raising":
            raise EnvironmentFailed("solve.sh ended with 1")
        word = "bad" if task.id == "wrong" or (task.id == "flaky" and self.solved % 2) else "good"
        await sandbox.write.aio("result", f"{word}\n")

    def cheats(self, task):
        return (Cheat(name="a cheat", script="echo cheat > result"),)

    def task_digest(self, task):
        return f"{self.digest[:16]}{task.id:.>16}" + "0" * 32

    def outside(self, task):
        return ("/srv/x",) if task.id == "wrong" else ()


def checked(environment, **options):
    work = check(environment, environment.tasks, **options)
    return asyncio.run_coroutine_threadsafe(work, loop()).result(120)


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setattr("sandmill.environments.check.state_root", lambda: tmp_path)


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("sound", Status.SOUND, ""),
        ("flaky", Status.FLAKY, "the reference solution does not pass: its reward is 0"),
        ("wrong", Status.BROKEN, "its reward is 0; it also changed /srv/x, which is not taken over"),
        ("raising", Status.BROKEN, "solve.sh ended with 1"),
        ("crashing", Status.BROKEN, "the grader crashed"),
        ("empty", Status.FORGEABLE, "untouched passes with reward 1"),
        ("loose", Status.FORGEABLE, "a cheat passes with reward 1"),
        ("unsolved", Status.UNKNOWN, "it has no reference solution"),
    ],
)
def test_each_kind_of_task_is_told(kind, status, reason):
    found = checked(Own(kind), times=2)[kind]
    assert found.status is status
    assert reason in found.reason
    assert len(found.trials) == (0 if kind == "unsolved" else 5)


def test_cheats_can_be_left_out():
    assert [trial.what for trial in checked(Own("loose"), cheats=False)["loose"].trials] == ["reference solution", "untouched"]


def test_training_refuses_a_task_that_failed_unless_it_was_told_otherwise():
    environment = Own("sound", "loose")
    refuse_failing(environment)
    checked(environment)
    with pytest.raises(ConfigError, match=r"1 task.*such as loose: a cheat passes with reward 1"):
        refuse_failing(environment)
    assert failing(environment, environment.tasks) == {"loose": "a cheat passes with reward 1"}
    environment.splits = {"train": environment.tasks[:1], "heldout": ()}
    refuse_failing(environment)
    environment.splits = {"train": environment.tasks[1:], "heldout": ()}
    with pytest.raises(ConfigError, match="such as loose"):
        refuse_failing(environment)
    environment.allow_failing = True
    refuse_failing(environment)


def test_a_later_check_replaces_an_earlier_one_of_the_same_task_alone():
    environment = Own("sound", "loose")
    checked(environment)
    asyncio.run_coroutine_threadsafe(check(environment, environment.tasks[1:], cheats=False), loop()).result(60)
    assert {task: one.status for task, one in recorded(environment, environment.tasks).items()} == {
        "sound": Status.SOUND,
        "loose": Status.SOUND,
    }


def test_a_record_of_another_version_or_machine_says_nothing(monkeypatch):
    environment = Own("loose")
    checked(environment)
    environment.digest = "1" * 64
    assert failing(environment, environment.tasks) == {}
    environment.digest = Own.digest
    monkeypatch.setattr("sandmill.environments.check.architecture", lambda: "other")
    assert failing(environment, environment.tasks) == {}


def test_a_task_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="there is no task 'sond'; did you mean 'sound'"):
        all_tasks(Own("sound", "loose"), ["sond"])


def test_an_environment_without_reference_solutions_says_so():
    from sandmill.environments import registry

    with pytest.raises(ConfigError, match="has no reference solutions"):
        asyncio.run_coroutine_threadsafe(check(registry.get("shell@1.0.0"), ()), loop()).result(60)
