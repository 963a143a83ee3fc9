"""`shell@1.0.0` as an environment: determinism, options, rewards."""

import asyncio

import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.builtin.shell.environment import answered
from sandmill.environments.builtin.shell.options import DEMO_FAMILIES, FAMILIES
from sandmill.environments.grading import grade_episode
from sandmill.environments.splits import check_splits
from sandmill.environments.task import AgentLimited, Command, Graded, Limit, NoAnswer, Submission
from sandmill.errors import ConfigError

WORKED = Command(script="true", exit_code=0, output="")
FAILED = Command(script="false", exit_code=1, output="")
CUT = Command(script="sleep 99", exit_code=None, output="")


def shell(seed=42, train=60, held_out=30, **options):
    return ShellEnvironment(EnvironmentSection(name="shell@1.0.0", train_tasks=train, held_out_tasks=held_out, seed=seed, options=options))


def grade(environment, task, answer, commands=(WORKED,), limit=None):
    return asyncio.run(grade_episode(environment, task, Submission(answer=answer, commands=commands, limit=limit), None))


def test_the_same_section_makes_the_same_tasks_files_and_digest():
    one, other = shell(), shell()
    assert one.splits == other.splits
    assert one.digest == other.digest
    assert all(one.files(task) == other.files(task) for split in one.splits.values() for task in split)


def test_a_longer_split_begins_with_the_shorter_one():
    assert shell(train=120).splits["train"][:60] == shell(train=60).splits["train"]


@pytest.mark.parametrize(
    "change", [{"seed": 43}, {"train": 61}, {"held_out": 31}, {"families": ["lines", "read"]}, {"difficulty": "medium"}]
)
def test_whatever_changes_the_tasks_changes_the_digest(change):
    assert shell(**change).digest != shell().digest


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_splits_are_disjoint_and_families_balanced(seed):
    environment = shell(seed, families=list(FAMILIES), train=90, held_out=45)
    check_splits(environment.splits, "shell@1.0.0")
    assert {name: len(tasks) for name, tasks in environment.splits.items()} == {"train": 90, "tuning": 45, "heldout": 45, "unseen": 45}
    for tasks in environment.splits.values():
        families = [task.metadata["family"] for task in tasks]
        assert {families.count(family) for family in FAMILIES} == {len(tasks) // len(FAMILIES)}


def test_a_task_gives_no_answer_away():
    environment = shell(families=["sum", "hop", "last"])
    for tasks in environment.splits.values():
        for task in tasks:
            answer = environment.expected_answer(task)
            assert answer not in task.prompt.split()
            assert answer not in task.metadata.values()
            assert set(task.metadata) == {"family", "difficulty", "split", "commands"}


def test_prompts_differ_between_tasks_but_identities_ignore_phrasing():
    tasks = shell().splits["train"]
    assert len({task.identity for task in tasks}) == len(tasks)


@pytest.mark.parametrize("family", DEMO_FAMILIES)
def test_rewards(family):
    environment = shell(families=[family])
    task = environment.splits["heldout"][0]
    answer = environment.expected_answer(task)
    right = Graded(reward=1.1, passed=True, parts={"solved": 1.0, "worked": 0.1})
    assert grade(environment, task, answer) == right
    assert grade(environment, task, answer, (FAILED, CUT, WORKED)) == right
    assert grade(environment, task, f" `{answer}`.\n") == right
    assert grade(environment, task, "wrong") == Graded(reward=0.1, passed=False, parts={"solved": 0.0, "worked": 0.1})
    assert grade(environment, task, "", (FAILED,)) == Graded(reward=0.0, passed=False, parts={"solved": 0.0, "worked": 0.0})
    assert grade(environment, task, None) == NoAnswer(reward=0.0)


@pytest.mark.parametrize("commands", [(), (FAILED,), (CUT,)])
def test_a_guess_without_a_command_that_worked_is_not_solved(commands):
    environment = shell()
    task = environment.splits["train"][0]
    verdict = grade(environment, task, environment.expected_answer(task), commands)
    assert verdict == Graded(reward=0.0, passed=False, parts={"solved": 0.0, "worked": 0.0})


def test_a_limited_agent_without_an_answer_is_graded_as_limited():
    environment = shell()
    verdict = grade(environment, environment.splits["train"][0], None, limit=Limit.TURNS)
    assert verdict == AgentLimited(limit=Limit.TURNS, reward=0.0, passed=False, parts={"solved": 0.0, "worked": 0.0})


@pytest.mark.parametrize("answer", ["1", "11", "1 1", "1.0", "", "one", "-1", "1;2", "\x001"])
def test_only_the_answer_is_right(answer):
    environment = shell(families=["read"])
    task = environment.splits["train"][0]
    assert not answered(environment._by_id[task.id], answer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"familes": ["read"]}, r"options\.familes: the shell environment has no option 'familes'; did you mean 'families'\?"),
        ({"families": ["red"]}, r"options\.families: there is no family 'red'; did you mean 'read'\?"),
        ({"families": []}, r"options\.families: expected a list of families"),
        ({"families": "read"}, r"options\.families: expected a list of families"),
        ({"families": 3}, r"options\.families: expected a list of families"),
        ({"families": ["read", "read"]}, "a family is named twice"),
        ({"difficulty": "extreme"}, r"options\.difficulty: expected one of easy, medium, hard, found 'extreme'"),
        ({"difficulty": 3}, r"options\.difficulty: expected one of easy, medium, hard, found 3"),
    ],
)
def test_wrong_options_name_the_field_and_the_nearest(options, message):
    with pytest.raises(ConfigError, match=message):
        shell(**options)


def test_many_tasks_are_made_quickly_and_all_differ():
    tasks = shell(train=5000, held_out=500).splits
    assert len({task.identity for split in tasks.values() for task in split}) == 6500
