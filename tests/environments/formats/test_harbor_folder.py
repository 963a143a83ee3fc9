"""Task folders of both layouts: what is read, and that what is wrong is named before anything runs."""

import os
import shutil

import harbor_folders as folders
import pytest
from harbor_attempts import harbor, on_loop

from sandmill.environments import registry
from sandmill.environments.formats.harbor.dockerfile import adapted
from sandmill.environments.splits import check_splits
from sandmill.errors import ConfigError
from sandmill.sandboxes import Egress


def test_both_layouts_are_found_in_one_folder(tmp_path):
    for make in (folders.greeting, folders.steps, folders.old):
        make(tmp_path)
    environment = harbor(tmp_path)
    prompts = {task.id: task.prompt for task in environment.tasks}
    assert prompts == {
        "greeting": "Write `hello` into /app/greeting.txt.",
        "old": "Write `hello` into /app/greeting.txt.",
        "steps": "Step one.",
    }
    assert {task.id: environment.agent_timeout_s(task) for task in environment.tasks} == {"greeting": None, "old": 360.0, "steps": None}
    assert {task.id: task.metadata["layout"] for task in environment.tasks}["old"] == "terminal-bench"
    check_splits(environment.splits, "own")
    assert (len(environment.splits["train"]), len(environment.splits["heldout"])) == (2, 1)


def test_one_task_folder_is_a_task_set(tmp_path):
    assert [task.id for task in harbor(folders.greeting(tmp_path)).tasks] == ["greeting"]


def test_the_digest_follows_every_file(tmp_path):
    place = folders.greeting(tmp_path)
    before = harbor(place).digest
    assert harbor(place).digest == before
    for name in ("environment/seed.txt", "tests/test.sh", "solution/solve.sh", "instruction.md"):
        (place / name).write_text((place / name).read_text() + "\n#x\n")
        after = harbor(place).digest
        assert after != before
        before = after
    assert harbor(place, take=["/srv"]).digest != before


def test_a_tasks_digest_is_its_own_and_not_its_places(tmp_path):
    folders.scores(tmp_path)
    place = folders.greeting(tmp_path)
    one = harbor(tmp_path)
    before = {task.id: one.task_digest(task) for task in one.tasks}
    shutil.copytree(place, tmp_path / "elsewhere" / "greeting")
    moved = harbor(tmp_path / "elsewhere", verifiers=7)
    assert moved.task_digest(moved.tasks[0]) == before["greeting"]
    (place / "instruction.md").write_text("Another.")
    shutil.rmtree(tmp_path / "elsewhere")
    after = harbor(tmp_path)
    assert [after.task_digest(task) == before[task.id] for task in after.tasks] == [False, True]


def _without_tests(place):
    (place / "tests" / "test.sh").unlink()
    (place / "tests" / "test_outputs.py").unlink()
    (place / "tests").rmdir()


def _link(place, name, target):
    (place / name).unlink()
    os.symlink(target, place / name)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_without_tests, "tests: there is no such folder"),
        (
            lambda place: (place / "tests" / "test.sh").rename(place / "tests" / "tests.sh"),
            "there is no test.sh in it, so nothing could be",
        ),
        (lambda place: (place / "instruction.md").unlink(), "instruction.md: it cannot be read"),
        (lambda place: (place / "instruction.md").write_text("# canary only\n"), "an instruction has 1 to"),
        (lambda place: _link(place, "instruction.md", "/etc/hostname"), "instruction.md: it is a link"),
        (lambda place: _link(place, "tests/test_outputs.py", "/etc/passwd"), "test_outputs.py: it is a link"),
        (lambda place: os.symlink("/etc", place / "tests" / "more"), "tests/more: it is a link"),
        (lambda place: (place / "environment" / "Dockerfile").unlink(), "there is neither environment/Dockerfile nor docker_image"),
        (lambda place: (place / "test").mkdir(), "'test' is nothing that a task's folder has; did you mean 'tests'?"),
        (lambda place: os.mkfifo(place / "tests" / "pipe"), "tests/pipe: it is no plain file"),
    ],
)
def test_a_broken_folder_is_named(tmp_path, break_it, said):
    place = folders.greeting(tmp_path)
    break_it(place)
    with pytest.raises(ConfigError) as caught:
        harbor(tmp_path)
    assert said in str(caught.value)
    assert str(place) in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[[steps]]\nname = "three"\n[[steps]]\nname = "tow"\n', "there is no folder steps/tow; did you mean 'two'?"),
        ('artifacts = ["relative"]\n[[steps]]\nname = "one"\n', "'relative' is no absolute path"),
        ('artifacts = ["/tests/x"]\n[[steps]]\nname = "one"\n', "'/tests/x' is not the agent's to say"),
    ],
)
def test_steps_and_artifacts_are_checked(tmp_path, toml, said):
    (folders.steps(tmp_path) / "task.toml").write_text(toml)
    with pytest.raises(ConfigError, match=None) as caught:
        harbor(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("parser_name: swebench\n", "there is no parser 'swebench'; the nearest is pytest"),
        ("max_test_timeout: 3\n", "unknown key 'max_test_timeout'; did you mean 'max_test_timeout_sec'?"),
    ],
)
def test_an_old_task_file_is_checked_with_its_line(tmp_path, change, said):
    place = folders.old(tmp_path)
    (place / "task.yaml").write_text("instruction: x\n" + change)
    with pytest.raises(ConfigError) as caught:
        harbor(tmp_path)
    assert said in str(caught.value)
    assert f"{place / 'task.yaml'}:2" in str(caught.value)


def test_tasks_of_several_containers_are_refused(tmp_path):
    (folders.old(tmp_path) / "docker-compose.yaml").write_text("services:\n  client: {}\n  database: {}\n")
    with pytest.raises(ConfigError, match="tasks of several containers"):
        harbor(tmp_path)


def test_two_tasks_of_one_name_are_refused(tmp_path):
    folders.greeting(tmp_path)
    place = folders.greeting(tmp_path, name="again")
    (place / "task.toml").write_text('[task]\nname = "own/greeting"\n')
    with pytest.raises(ConfigError, match="it is named 'own/greeting'"):
        harbor(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bas": "host"}, "unknown key 'bas'; did you mean 'base'?"),
        ({"run": "skp"}, "it is one of execute, skip, not 'skp'; did you mean 'skip'?"),
        ({"take": ["/etc"]}, "'/etc' is not the agent's to say"),
        ({"take": ["/logs"]}, "'/logs' is not the agent's to say: /logs/verifier comes from the task"),
        ({"tools": "/nowhere"}, "there is no folder '/nowhere'"),
        ({"leave_out": ["greeting"]}, "spec.environment.leaveOut: leaves no task"),
        ({"leave_out": ["greting"]}, "there is no task 'greting'; did you mean 'greeting'?"),
    ],
)
def test_options_are_checked(tmp_path, options, said):
    folders.greeting(tmp_path)
    with pytest.raises(ConfigError) as caught:
        harbor(tmp_path, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "options", "network"),
    [
        ("", {}, Egress.deny()),
        ('[environment]\nnetwork_mode = "public"\n', {}, Egress.deny()),
        ('[environment]\nnetwork_mode = "public"\n', {"network": "as-task"}, Egress.open()),
        ('[environment]\nnetwork_mode = "no-network"\n', {"network": "as-task"}, Egress.deny()),
        ("[environment]\nallow_internet = false\n", {"network": "as-task"}, Egress.deny()),
        ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n', {"network": "as-task"}, Egress.allow("pypi.org")),
    ],
)
def test_the_network_is_the_tasks_where_the_options_say_so(tmp_path, toml, options, network):
    environment = harbor(folders.greeting(tmp_path, toml=toml or "[task]\n"), **options)
    assert on_loop(environment.sandbox_for(environment.tasks[0])).network == network


def test_resources_are_those_of_the_task(tmp_path):
    place = folders.greeting(
        tmp_path, toml="[environment]\ncpus = 2\nmemory_mb = 300\nstorage_mb = 100\nenv = {A = 'b'}\nworkdir = '/srv'\n"
    )
    environment = harbor(place)
    spec = on_loop(environment.sandbox_for(environment.tasks[0]))
    assert (spec.cpu, spec.memory_bytes, spec.disk_bytes, spec.workdir, spec.env) == (2.0, 300 << 20, 100 << 20, "/srv", {"A": "b"})


def test_a_place_without_tasks_is_named(tmp_path):
    with pytest.raises(ConfigError, match="neither it nor a folder in it has a task"):
        harbor(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        harbor(tmp_path / "none")


def test_the_reference_is_one_line_of_a_manifest(tmp_path):
    place = folders.greeting(tmp_path)
    assert registry.get(f"harbor/{place}").name == "harbor/greeting"


def test_a_dockerfile_keeps_its_lines():
    text = 'FROM ubuntu:24.04 AS base\nLABEL a=b \\\n  c=d\nRUN apt-get update && \\\n    # a comment\n    true\nCMD ["x"]\nCOPY a b\n'
    found = adapted(text, base="host", has=lambda name: False, skip_run=True)
    assert found == "FROM host AS base\n\n\n\n\n\n\nCOPY a b\n"
    assert adapted(text, base="host", has=lambda name: True, skip_run=False).startswith("FROM ubuntu:24.04 AS base\n\n\nRUN apt-get")
    assert adapted(text, base="", has=lambda name: False, skip_run=False).startswith("FROM ubuntu:24.04")
