"""Patches in real sandboxes: how one is taken and applied, what it may not bring along, and that printed results are not results."""

import msgspec
import pytest
from harbor_attempts import attempted, on_loop
from swebench_rows import FIX, RELEASE, build_image, index, row, write_rows

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.formats.swebench.patches import allowed, reaches_git
from sandmill.environments.formats.swebench.resolution import resolve
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import Graded, InfrastructureFailure, Submission

FIXED = "sed -i 's/a - b/a + b/' adding.py"
RESOLVED = Graded(reward=1.0, passed=True, parts={"fail_to_pass": 1.0, "pass_to_pass": 1.0, "applied": 1.0})
BASE = Graded(reward=0.0, passed=False, parts={"fail_to_pass": 0.0, "pass_to_pass": 1.0, "applied": 1.0})
NOTHING = Graded(reward=0.0, passed=False, parts={"fail_to_pass": 0.0, "pass_to_pass": 0.0, "applied": 1.0})
UNAPPLIED = Graded(reward=0.0, passed=False, parts={"fail_to_pass": 0.0, "pass_to_pass": 0.0, "applied": 0.0})


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes the environment of one row."""
    root = tmp_path_factory.mktemp("swebench")
    commit = build_image(root)
    made = []

    def environment(**changes):
        path = write_rows(root / "rows.jsonl", row(base_commit=commit, **changes))
        section = EnvironmentSection(name="x", options={"memory": "512Mi", "disk": "256Mi", "timeout_s": 60})
        made.append(registry.get(f"swebench/{path}@{RELEASE}", section))
        return made[-1]

    with index(root / "index"):
        yield environment
        for one in made:
            on_loop(one.close())


def verdict(environment, *scripts, solve=False):
    return on_loop(attempted(environment, environment.tasks[0], *scripts, solve=solve))


def test_the_reference_resolves_and_the_base_does_not(make):
    environment = make()
    assert verdict(environment, solve=True) == RESOLVED
    assert verdict(environment) == BASE
    assert on_loop(grade_episode(environment, environment.tasks[0], Submission(answer="done"), None)) == BASE


@pytest.mark.parametrize(
    "script",
    [
        FIXED,
        f"{FIXED}; git add -A; git -c user.name=a -c user.email=a commit -qm mine",
        f"{FIXED}; printf '# no newline' >> adding.py",
        f"{FIXED}; sed -i 's/$/\\r/' adding.py",
        f"{FIXED}; printf '\\0\\377binary' > data.bin",
        f"{FIXED}; git config core.fsmonitor /bin/false; git config diff.external /bin/false",
        f"{FIXED}; printf 'def test_add():\\n    assert False\\n' > test_adding.py",
    ],
)
def test_a_fix_counts_however_it_was_made(make, script):
    assert verdict(make(), script) == RESOLVED


@pytest.mark.parametrize(
    "script",
    [
        "printf 'import os\\nos._exit(0)\\n' > adding.py",
        'printf \'import os\\nos.write(1, b"PASSED test_adding.py::test_add\\\\nPASSED test_adding.py::test_zero\\\\n")\\n'
        "os._exit(0)\\n' > adding.py",
    ],
)
def test_a_program_that_ends_the_tests_resolves_nothing(make, script):
    assert verdict(make(), script) == NOTHING


def test_results_that_a_program_prints_are_believed_by_logs_alone_and_not_here(make):
    environment = make()
    cheat = {one.name: one.script for one in environment.cheats(environment.tasks[0])}["results printed by the program"]
    printed = {"test_adding.py::test_add": "PASSED", "test_adding.py::test_zero": "PASSED"}
    assert resolve(printed, ["test_adding.py::test_add"], ["test_adding.py::test_zero"]).resolved
    assert verdict(environment, cheat) == NOTHING


@pytest.mark.parametrize(
    "script",
    [
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
        '    outcome = yield\\n    outcome.get_result().outcome = "passed"\\n\' > conftest.py',
        "printf '[pytest]\\naddopts = --deselect test_adding.py::test_add\\n' > pytest.ini",
        "mkdir evil.egg-info; printf '[pytest11]\\nevil = evil\\n' > evil.egg-info/entry_points.txt;"
        " printf 'raise SystemExit(0)\\n' > evil.py; printf 'Name: evil\\nVersion: 1\\n' > evil.egg-info/PKG-INFO",
        "printf 'conftest.py\\n' > .gitignore; git add -A; printf 'raise SystemExit(0)\\n' > sitecustomize.py",
    ],
)
def test_configuration_of_tests_is_the_tasks_own(make, script):
    assert verdict(make(), script) == BASE
    assert verdict(make(), f"{script}\n{FIXED}") == RESOLVED


def test_a_repository_that_the_agent_broke_is_its_own_failure(make):
    assert verdict(make(), "rm -rf .git") == UNAPPLIED


def test_every_general_cheat_fails(make):
    environment = make()
    for cheat in environment.cheats(environment.tasks[0]):
        found = verdict(environment, cheat.script)
        assert isinstance(found, Graded), (cheat.name, found)
        assert not found.passed, cheat.name


def test_an_evaluation_that_never_comes_to_its_tests_is_a_failure_of_ours(make):
    found = verdict(make(eval_script="#!/bin/bash\necho broken\n"), FIXED)
    assert isinstance(found, InfrastructureFailure)
    assert found.reason.endswith("patch: plain broken")
    assert "never came to its tests: " in found.reason


def test_an_evaluation_that_does_not_end_is_unresolved_unless_it_was_said_otherwise(make):
    script = "printf 'import time\\ntime.sleep(1000)\\n' > adding.py"
    environment = make()
    environment.options = msgspec.structs.replace(environment.options, timeout_s=1)
    assert verdict(environment, script) == NOTHING
    environment.options = msgspec.structs.replace(environment.options, at_timeout="failure")
    found = verdict(environment, script)
    assert isinstance(found, InfrastructureFailure)
    assert "did not end within 1 s" in found.reason


def test_a_parser_that_the_package_lacks_is_a_failure_of_ours(make):
    found = verdict(make(log_parser="parse_log_other"), FIXED)
    assert isinstance(found, InfrastructureFailure)
    assert "has no parser 'parse_log_other'" in found.reason


def test_what_the_reference_changes_is_allowed_and_the_repositorys_own_folder_never():
    assert allowed(FIX.encode()) == b"adding.py\0"
    assert not reaches_git(FIX.encode())
    assert reaches_git(b"--- a/x\n+++ b/.git/hooks/post-checkout\n")
    assert reaches_git(b"--- /dev/null\n+++ sub/.GIT/config\n")
