"""Every cheat works against a naive grader and gains nothing here."""

import sys
from pathlib import Path

import harbor_folders as folders
import naive_grader as naive
import pytest
from harbor_attempts import attempted, harbor, on_loop

from sandmill.environments.handover import sandbox_for
from sandmill.environments.task import Graded, InfrastructureFailure
from sandmill.environments.verifying.cheats import CHEATS

sys.path.append(str(Path(__file__).parents[2] / "sandboxes" / "images"))
BY_NAME = {cheat.name: cheat.script for cheat in CHEATS}
GREETING = {"test_outputs.py": folders.GREETING_TEST.encode()}
IMPORTING = {
    "test_outputs.py": b"import sys\nsys.path.insert(0, '/app')\n\ndef test_add():\n    import adding\n    assert adding.add(2, 3) == 5\n"
}
NAIVELY = {
    "planted rewards": (folders.greeting, naive.PYTEST_VERIFIER, GREETING, {}),
    "programs that exit 0": (folders.greeting, naive.UVX_VERIFIER, GREETING, {}),
    "deleted and replaced tests": (folders.greeting, naive.PYTEST_VERIFIER, GREETING, {"staged_first": True}),
    "planted conftest and start-up files": (folders.greeting, naive.PYTEST_VERIFIER, GREETING, {}),
    "background writer": (folders.greeting, naive.PYTEST_VERIFIER, GREETING, {}),
    "symlinked logs": (folders.greeting, naive.PYTEST_VERIFIER, GREETING, {}),
    "own programs that exit at once": (folders.program, naive.PYTEST_VERIFIER, IMPORTING, {}),
    "own programs that write the reward": (folders.program, naive.PYTEST_VERIFIER, IMPORTING, {}),
    "links to expected results": (folders.answer, naive.DIFF_VERIFIER, {"expected_answer.txt": b"42\n"}, {}),
}
SOLUTIONS = {
    folders.greeting: "echo hello > greeting.txt",
    folders.program: "sed -i 's/a - b/a + b/' adding.py",
    folders.answer: "echo 42 > answer.txt",
}


async def _naive(environment, script, verifier, tests, **more):
    spec = await sandbox_for(environment, environment.tasks[0])
    return await naive.naive_reward(spec, script, verifier, tests, **more)


def test_every_cheat_is_tried():
    assert set(NAIVELY) | {"patched interpreter"} == set(BY_NAME)


@pytest.mark.parametrize("name", NAIVELY)
def test_it_works_against_a_naive_grader(tmp_path, name):
    make, verifier, tests, more = NAIVELY[name]
    environment = harbor(make(tmp_path))
    assert on_loop(_naive(environment, SOLUTIONS[make], verifier, tests)) == 1.0
    assert on_loop(_naive(environment, "true", verifier, tests)) == 0.0
    assert on_loop(_naive(environment, BY_NAME[name], verifier, tests, **more)) == 1.0


def test_a_patched_program_works_against_a_naive_grader_and_gains_nothing_here(tmp_path):
    """On an image whose programs its root may replace: this machine's own are read-only in every sandbox."""
    from image_archives import docker_save, layer, programs

    names = ("sh", "bash", "cat", "grep", "mkdir", "mv", "chmod", "rm", "find", "chown", "ls")
    archive = docker_save(tmp_path / "image.tar", [layer(*programs(*names))], config={"WorkingDir": "/app"})
    place = folders.greeting(tmp_path / "tasks", verifier=naive.GREP_VERIFIER.decode())
    (place / "task.toml").write_text(f'[environment]\ndocker_image = "docker-archive:{archive}"\n')
    environment = harbor(place)
    script = BY_NAME["patched interpreter"]
    assert on_loop(_naive(environment, "echo hello > greeting.txt", naive.GREP_VERIFIER, {})) == 1.0
    assert on_loop(_naive(environment, "true", naive.GREP_VERIFIER, {})) == 0.0
    assert on_loop(_naive(environment, script, naive.GREP_VERIFIER, {})) == 1.0
    assert on_loop(attempted(environment, environment.tasks[0], "echo hello > greeting.txt")).passed
    assert on_loop(attempted(environment, environment.tasks[0], script)) == Graded(reward=0.0, passed=False, parts={"reward": 0.0})


@pytest.mark.parametrize("make", [folders.program, folders.answer, folders.old])
def test_none_gains_anything_here(tmp_path, make):
    environment = harbor(make(tmp_path))
    task = environment.tasks[0]
    assert on_loop(attempted(environment, task, solve=True)) == Graded(reward=1.0, passed=True, parts={"reward": 1.0})
    for name, script in BY_NAME.items():
        verdict = on_loop(attempted(environment, task, script))
        assert isinstance(verdict, InfrastructureFailure) or not verdict.passed, name
        assert verdict == Graded(reward=0.0, passed=False, parts={"reward": 0.0}), name


def test_none_gains_anything_at_any_of_several_steps(tmp_path):
    environment = harbor(folders.steps(tmp_path))
    task = environment.tasks[0]
    for name, script in BY_NAME.items():
        verdict = on_loop(attempted(environment, task, script, script, script))
        assert verdict == Graded(reward=0.0, passed=False, parts={"reward": 0.0}), name
