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
        passed = result == b"good\n" or ("empty" in task.id and not result) or (task.id == "loose" and result == b"cheat\n")
        return Graded(reward=float(passed), passed=passed)

    def has_solution(self, task):
        return "unsolved" not in task.id

    async def solve(self, task, sandbox):
        self.solved += 1
        if task.id == "raising":
            raise EnvironmentFailed("solve.sh ended with 1")
        word = "bad" if task.id == "wrong" or (task.id == "flaky" and self.solved % 2) else "good"
        await sandbox.write.aio("result", f"{word}\n")

    def cheats(self, task):
        return (Cheat(name="a cheat", script="echo cheat > result"),)

    def task_digest(self, task):
        return f"{self.digest[:12]}{task.id:.>20}" + "0" * 32

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
        ("unsolved", Status.UNKNOWN, "it has no reference solution; nothing that was tried passes"),
        ("unsolved and empty", Status.FORGEABLE, "untouched passes with reward 1"),
    ],
)
def test_each_kind_of_task_is_told(kind, status, reason):
    found = checked(Own(kind), times=2)[kind]
    assert found.status is status
    assert reason in found.reason
    assert len(found.trials) == (4 if "unsolved" in kind else 6)


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
    refuse_failing(environment, allow=True)


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


class Questions:
    """Graded by the answer; what passes besides the right one depends on the kind of task."""

    name, version, digest = "questions", "1.0.0", "0" * 64
    sandbox = SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20)

    def __init__(self, *kinds):
        self.splits = {"train": tuple(Task(id=kind, prompt="?", identity=kind) for kind in kinds), "heldout": ()}
        self.graded = 0

    def files(self, task):
        return {}

    async def prepare(self, task, sandbox):
        pass

    async def collect(self, task, sandbox):
        return {}

    def expected_answer(self, task):
        return None if "unanswered" in task.id else "7"

    async def grade(self, task, submission, artifacts):
        self.graded += 1
        answer = submission.answer
        if task.id == "crashing" and answer == "zzz":
            raise GraderFailed("the grader crashed")
        right = answer == "7" and task.id != "wrong"
        passed = (
            right
            or (answer is None and "silent" in task.id)
            or (answer == "" and "empty" in task.id)
            or (answer == "zzz" and "any" in task.id)
        )
        if task.id == "flaky":
            passed = passed and self.graded % 2 == 1
        return Graded(reward=float(passed) + (self.graded if task.id == "moody" else 0), passed=passed)


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("sound", Status.SOUND, ""),
        ("wrong", Status.BROKEN, "its own answer does not pass: its reward is 0"),
        ("flaky", Status.FLAKY, "its own answer does not pass: its reward is 0"),
        ("moody", Status.FLAKY, "its own answer is graded differently: reward 2, then 3"),
        ("crashing", Status.BROKEN, "answer zzz could not be graded: grader: the grader crashed"),
        ("silent", Status.FORGEABLE, "silence passes with reward 1"),
        ("empty", Status.FORGEABLE, "an empty answer passes with reward 1"),
        ("any", Status.FORGEABLE, "answer zzz passes with reward 1"),
        ("unanswered", Status.UNKNOWN, "it has no reference solution; nothing that was tried passes"),
        ("unanswered any", Status.FORGEABLE, "answer zzz passes with reward 1"),
    ],
)
def test_each_kind_of_question_is_told(kind, status, reason):
    environment = Questions(kind)
    work = check(environment, environment.splits["train"], times=2)
    found = asyncio.run_coroutine_threadsafe(work, loop()).result(60)[kind]
    assert (found.status, found.reason) == (status, reason)
    assert len(found.trials) == environment.graded == (6 if "unanswered" in kind else 8)


def test_training_refuses_a_question_that_failed_until_its_environment_is_another():
    environment = Questions("sound", "any", "unanswered")
    asyncio.run_coroutine_threadsafe(check(environment, environment.splits["train"]), loop()).result(60)
    with pytest.raises(ConfigError, match=r"1 task.* of questions .*such as any: answer zzz passes.*leaveOut, or set allowFailing"):
        refuse_failing(environment)
    environment.digest = "1" * 64
    refuse_failing(environment)


def test_commands_that_lead_to_an_answer_are_run():
    from sandmill.environments import registry

    environment = registry.get("shell@1.0.0")
    tasks = environment.splits["train"][:2]
    found = asyncio.run_coroutine_threadsafe(check(environment, tasks), loop()).result(60)
    assert [one.status for one in found.values()] == [Status.SOUND] * 2, found
