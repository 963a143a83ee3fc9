"""The registry: references found, and what is wrong named with the way out."""

import pytest
from own_environment import HEAD, write_environment

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.isolation import IsolatedEnvironment
from sandmill.errors import ConfigError, EnvironmentFailed, UnknownEnvironment

GRADE = "return Graded(reward=1.0, passed=True)"


def test_the_built_in_family():
    environment = registry.get("shell@1.0.0", EnvironmentSection(name="shell@1.0.0", train_tasks=7, held_out_tasks=5))
    assert isinstance(environment, ShellEnvironment)
    assert {name: len(tasks) for name, tasks in environment.splits.items()} == {"train": 7, "tuning": 5, "heldout": 5, "unseen": 5}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("shel@1.0.0", "there is no environment 'shel@1.0.0'; the nearest is shell@1.0.0"),
        ("shell", "needs a version: write shell@1.0.0"),
        ("shell@2.0.0", "no version '2.0.0': write shell@1.0.0"),
        ("", "the nearest is shell@1.0.0"),
        ("\x1b[2J@1", r"there is no environment '\\x1b\[2J@1'"),
        ("no_such_module_here:environment", "there is no Python module 'no_such_module_here'"),
        ("no/such/file.py:environment", r"there is no file no/such/file\.py"),
        (":environment", "is not a reference"),
        ("harbor:tasks", "'harbor:tasks' is not a reference: write harbor/tasks"),
        ("swebench:rows.jsonl", "write swebench/rows.jsonl"),
        ("verl:data/train.parquet@0.9.1", "write verl/data/train.parquet@0.9.1"),
        ("habor/tasks", "there is no format 'habor'; did you mean harbor/tasks?"),
        ("harbor/", "'harbor/' is not a reference: write harbor/PATH"),
    ],
)
def test_an_unknown_reference_is_one_sentence(reference, message):
    with pytest.raises(UnknownEnvironment, match=message):
        registry.get(reference)


def test_tasks_of_a_package_of_ones_own_are_not_left_out_here():
    with pytest.raises(ConfigError, match=r"shell@1\.0\.0 draws its own splits; leave tasks out of them there"):
        registry.get("shell@1.0.0", EnvironmentSection(name="shell@1.0.0", leave_out=("x",)))


def test_a_file_with_an_object(tmp_path):
    environment = registry.get(write_environment(tmp_path, GRADE))
    assert isinstance(environment, IsolatedEnvironment)
    assert (environment.name, environment.version, environment.digest) == ("own", "0.1.0", "d1")
    assert [task.id for task in environment.splits["train"]] == ["a", "b"]


def test_demonstrations_are_kept_where_there_are_some(tmp_path):
    with_some = registry.get(write_environment(tmp_path, GRADE, tail="Own.demonstrations = lambda self, seed: iter([seed])\n"))
    assert list(with_some.demonstrations(3)) == [3]
    assert not hasattr(registry.get(write_environment(tmp_path, GRADE, name="without.py")), "demonstrations")


def test_a_factory_gets_the_section(tmp_path):
    tail = "def make(section):\n    made = Own()\n    made.version = f'{section.seed}.0.0'\n    return made\n"
    reference = write_environment(tmp_path, GRADE, tail=tail).replace(":environment", ":make")
    assert registry.get(reference, EnvironmentSection(name=reference, seed=7)).version == "7.0.0"


def test_a_module_on_the_path(tmp_path, monkeypatch):
    write_environment(tmp_path, GRADE, name="my_own_tasks.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.get("my_own_tasks:environment").name == "own"


def test_a_misspelt_object_names_the_nearest(tmp_path):
    reference = write_environment(tmp_path, GRADE).replace(":environment", ":enviroment")
    with pytest.raises(UnknownEnvironment, match="has no object 'enviroment'; did you mean 'environment'"):
        registry.get(reference)


def test_an_object_that_is_no_environment_names_what_it_lacks(tmp_path):
    reference = write_environment(tmp_path, GRADE, head=HEAD.replace("async def collect", "async def gather"))
    with pytest.raises(ConfigError, match="is a Own, not an environment: it lacks collect"):
        registry.get(reference)


def test_a_module_that_raises_is_one_sentence_with_the_cause(tmp_path):
    reference = write_environment(tmp_path, GRADE, tail="raise RuntimeError('no data set here')\n")
    with pytest.raises(EnvironmentFailed, match="could not be loaded: RuntimeError: no data set here") as caught:
        registry.get(reference)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_module_whose_own_import_is_missing_is_not_called_missing_itself(tmp_path, monkeypatch):
    write_environment(tmp_path, GRADE, name="needs_more.py", tail="import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvironmentFailed, match="No module named 'no_such_dependency'"):
        registry.get("needs_more:environment")


def test_a_leak_between_splits_is_refused_at_load(tmp_path):
    reference = write_environment(tmp_path, GRADE, head=HEAD.replace('identity="c"', 'identity="a"'))
    with pytest.raises(ConfigError, match=r"own@0\.1\.0 leaks: identity 'a'"):
        registry.get(reference)
