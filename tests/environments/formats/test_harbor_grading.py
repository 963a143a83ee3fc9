"""Task folders in real sandboxes: what is graded, where, by whom, and what is no verdict."""

import harbor_folders as folders
import pytest
from harbor_attempts import attempted, harbor, on_loop

from sandmill.environments.grading import grade_episode
from sandmill.environments.handover import sandbox_for
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure, Submission
from sandmill.errors import ImageError

SOLVED = Graded(reward=1.0, passed=True, parts={"reward": 1.0})
UNSOLVED = Graded(reward=0.0, passed=False, parts={"reward": 0.0})


def verdict(place, *scripts, solve=False, **options):
    environment = harbor(place, **options)
    return on_loop(attempted(environment, environment.tasks[0], *scripts, solve=solve))


def simple(tmp_path, verifier, **files):
    """A greeting whose verifier is `verifier`, and what else."""
    place = folders.greeting(tmp_path, verifier=f"#!/bin/bash\n{verifier}\n")
    for name, text in files.items():
        (place / name.replace("__", "/")).write_text(text)
    return place


def failure(found):
    assert isinstance(found, InfrastructureFailure), found
    assert found.boundary is Boundary.GRADER
    return found.reason


@pytest.mark.parametrize("make", [folders.greeting, folders.program, folders.old])
def test_the_solution_passes_and_the_untouched_state_fails(tmp_path, make):
    place = make(tmp_path)
    assert verdict(place, solve=True) == SOLVED
    assert verdict(place) == UNSOLVED


def test_an_agent_that_never_ran_a_command_is_graded_on_what_the_task_began_with(tmp_path):
    environment = harbor(folders.greeting(tmp_path))
    found = on_loop(grade_episode(environment, environment.tasks[0], Submission(answer="done"), None))
    assert found == UNSOLVED


def test_several_rewards_come_by_name(tmp_path):
    place = folders.scores(tmp_path)
    assert verdict(place, "printf 'a\\nb\\n' > poem.txt") == Graded(reward=0.5, passed=False, parts={"length": 0.0, "shape": 1.0})
    assert verdict(place, solve=True).passed


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("true", "the verifier wrote neither reward.json nor reward.txt"),
        ("exit 1", "the verifier wrote neither reward.json nor reward.txt"),
        (": > /logs/verifier/reward.txt", "reward.txt is empty"),
        ("echo nan > /logs/verifier/reward.txt", "not finite"),
        ("echo '{}' > /logs/verifier/reward.json", "reward.json must be an object of one to"),
        ("echo 1 > /logs/verifier/reward.txt; : > /logs/verifier/reward.json", "reward.json is empty"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "cannot be read"),
        ("mkdir /logs/verifier/reward.txt", "is a folder, not a file that the verifier wrote"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "is a link, not a file that the verifier wrote"),
        ("apt-get install -y libfoo-dev && echo 1 > /logs/verifier/reward.txt", "could not install libfoo-dev"),
        ("uvx -w numpy==2.0 pytest /tests || true; echo 0 > /logs/verifier/reward.txt", "could not install numpy==2.0"),
        ("pip install -q pandas || true; echo 0 > /logs/verifier/reward.txt", "could not install pandas"),
        ("uv run --with requests script.py || true; echo 0 > /logs/verifier/reward.txt", "could not install requests"),
        ("kill -9 $$", "the verifier wrote neither"),
    ],
)
def test_a_verifier_without_a_reward_is_a_failure_of_ours_and_never_zero(tmp_path, verifier, reason):
    assert reason in failure(verdict(simple(tmp_path, verifier), "echo hello > greeting.txt"))


def test_a_verifier_that_does_not_end_is_killed_and_a_failure(tmp_path):
    place = simple(tmp_path, "echo 1 > /logs/verifier/reward.txt; sleep 1000 & sleep 1000")
    (place / "task.toml").write_text("[verifier]\ntimeout_sec = 1\n")
    assert "did not end within 1 s" in failure(verdict(place))


def test_a_verifier_that_cannot_be_started_is_a_failure(tmp_path):
    place = folders.greeting(tmp_path, verifier="#!/no/such/shell\n")
    assert "could not be started" in failure(verdict(place))


def test_what_the_agent_planted_outside_its_workdir_is_not_there_and_noted(tmp_path):
    place = simple(tmp_path, "ls /srv /logs /root; [ ! -e /srv/x ] && echo 1 > /logs/verifier/reward.txt")
    environment = harbor(place)
    assert on_loop(attempted(environment, environment.tasks[0], "echo x > /srv/x; echo y > inside")) == SOLVED
    assert environment.outside(environment.tasks[0]) == ("/srv", "/srv/x")


def test_declared_paths_are_taken_over(tmp_path):
    place = simple(tmp_path, "cat /srv/x/y > /logs/verifier/reward.txt")
    script = "mkdir -p /srv/x; echo 1 > /srv/x/y"
    assert "reward.txt is empty" in failure(verdict(place, script))
    assert verdict(place, script, take=["/srv/x"]) == SOLVED
    assert verdict(place, script, take=["/"]) == SOLVED
    (place / "task.toml").write_text('artifacts = ["/srv/x"]\n')
    assert verdict(place, script) == SOLVED


def test_a_workdir_that_became_a_link_is_not_followed(tmp_path):
    place = simple(tmp_path, "ls -A /app > /tmp/seen; [ -s /tmp/seen ] && echo 1 || echo 0; ls -A /app >&2", tests__x="")
    (place / "tests" / "test.sh").write_text(
        "#!/bin/bash\nif [ -L /app ] || [ -e /app/passwd ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )
    assert verdict(place, "cd /; rm -rf /app; ln -s /etc /app") == UNSOLVED
    assert verdict(place, "cd /; rm -rf /app") == UNSOLVED


def test_tests_run_as_another_user_than_the_one_who_owns_rewards_and_tests(tmp_path):
    test = "import os, pathlib\n\ndef test_it():\n    assert os.getuid() != 0\n    pathlib.Path('/app/seed.txt').write_text('mine')\n"
    for path in ("/logs/verifier/reward.txt", "/tests/new.py", "/.sandmill-run/missing", "/logs/new", "/usr/bin/new", "/root/x"):
        test += f"    try:\n        open({path!r}, 'w')\n        raise SystemExit({path!r})\n    except PermissionError:\n        pass\n"
        test += "    except OSError as error:\n        assert error.errno == 30\n"
    place = folders.greeting(tmp_path)
    (place / "tests" / "test_outputs.py").write_text(test)
    assert verdict(place, "chmod 600 seed.txt") == SOLVED


@pytest.mark.parametrize(
    "script",
    [
        "ln -s /tests/expected_answer.txt answer.txt",
        "ln -s ../tests/expected_answer.txt answer.txt",
        "ln -s /usr up; ln -s up/../tests/expected_answer.txt answer.txt",
        "ln -s /proc/self/root/tests/expected_answer.txt answer.txt",
        "ln -s /proc p; ln -s p/self/cwd/../tests/expected_answer.txt answer.txt",
        "ln -s other answer.txt; ln -s /tests/expected_answer.txt other",
        "mkdir d; ln -s /tests d/e; ln -s d/e/expected_answer.txt answer.txt",
        "mkfifo answer.txt",
    ],
)
def test_a_link_to_the_expected_result_is_no_result(tmp_path, script):
    assert verdict(folders.answer(tmp_path), script) == UNSOLVED


def test_other_links_stay(tmp_path):
    assert (
        verdict(folders.answer(tmp_path), "echo 42 > real; mkdir d; ln -s ../real d/link; ln -s d/link answer.txt; ln -s /usr/bin b")
        == SOLVED
    )


def test_a_plugin_by_metadata_or_a_start_up_file_in_the_workdir_is_not_loaded(tmp_path):
    script = """
    mkdir evil.egg-info
    printf '[pytest11]\\nevil = evil\\n' > evil.egg-info/entry_points.txt
    printf 'Name: evil\\nVersion: 1\\n' > evil.egg-info/PKG-INFO
    printf 'import os\\nos._exit(0)\\n' | tee evil.py sitecustomize.py usercustomize.py > json.py
    """
    place = folders.program(tmp_path)
    for line in ("export PYTHONPATH=/app\npython3 -m pytest /tests/test_outputs.py", "PYTHONPATH=/app pytest /tests/test_outputs.py"):
        test = f"#!/bin/bash\n{line}\nif [ $? -eq 1 ]; then echo 0.25; else echo 1; fi > /logs/verifier/reward.txt\n"
        (place / "tests" / "test.sh").write_text(test)
        assert verdict(place, script).reward == 0.25


def test_python_m_pytest_finds_modules_of_the_working_folder(tmp_path):
    place = folders.program(tmp_path)
    (place / "tests" / "test.sh").write_text(
        "#!/bin/bash\npython3 -m pytest /tests/test_outputs.py && echo 1 > /logs/verifier/reward.txt\n"
    )
    (place / "tests" / "test_outputs.py").write_text("import adding\n\ndef test_it():\n    assert adding.add(1, 1) == 2\n")
    assert verdict(place, solve=True) == SOLVED


def test_a_workdir_that_is_roots_home_brings_no_start_up_file(tmp_path):
    place = simple(tmp_path, 'source $HOME/.local/bin/env; bash -lc true; [ -z "$PLANTED" ] && echo 1 > /logs/verifier/reward.txt')
    (place / "environment" / "Dockerfile").write_text("FROM ubuntu\nWORKDIR /root\n")
    script = "mkdir -p .local/bin; echo 'export PLANTED=1; exit' | tee .local/bin/env .profile .bash_profile > .bashrc"
    assert verdict(place, script) == SOLVED


def test_an_agent_that_filled_its_disk_is_graded_all_the_same(tmp_path):
    place = folders.greeting(tmp_path)
    (place / "task.toml").write_text("[environment]\nmemory_mb = 256\nstorage_mb = 32\n")
    assert verdict(place, "head -c 100000000 /dev/zero > big") == UNSOLVED
    assert verdict(place, "echo hello > greeting.txt; head -c 100000000 /dev/zero > big") == SOLVED


def test_what_a_timeout_means_can_be_said(tmp_path):
    place = simple(tmp_path, "sleep 1000")
    (place / "task.toml").write_text("[verifier]\ntimeout_sec = 1\n")
    assert verdict(place, at_timeout="unsolved") == UNSOLVED


@pytest.mark.parametrize(
    "ending",
    ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(0)", "os.execv('/bin/true', ['true'])", "import pytest; pytest.exit('x', 0)"],
)
def test_a_session_that_does_not_end_by_itself_is_not_passed(tmp_path, ending):
    place = folders.program(tmp_path)
    assert verdict(place, f"printf 'import os, sys\\n{ending}\\n' > adding.py") == UNSOLVED


def test_what_tests_leave_running_is_gone_before_the_reward_is_written(tmp_path):
    test = "import subprocess\n\ndef test_it():\n    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    place = folders.greeting(tmp_path)
    (place / "tests" / "test_outputs.py").write_text(test)
    script = (place / "tests" / "test.sh").read_text()
    (place / "tests" / "test.sh").write_text(
        script + "\nif grep -qs sleep /proc/[0-9]*/cmdline; then echo 0 > /logs/verifier/reward.txt; fi\n"
    )
    assert verdict(place) == SOLVED


def test_a_ctrf_report_says_what_the_tests_came_to(tmp_path):
    place = folders.greeting(tmp_path)
    script = (place / "tests" / "test.sh").read_text().split("if [ $?")[0]
    script += (
        "python3 -c \"import json; s = json.load(open('/logs/verifier/ctrf.json'))['results']['summary']; print(s['passed'] / s['tests'])\""
    )
    (place / "tests" / "test.sh").write_text(script + " > /logs/verifier/reward.txt\n")
    (place / "tests" / "test_outputs.py").write_text(folders.GREETING_TEST + "\n\ndef test_other():\n    pass\n")
    assert verdict(place) == Graded(reward=0.5, passed=False, parts={"reward": 0.5})


def test_steps_go_one_after_the_other_in_one_sandbox(tmp_path):
    place = folders.steps(tmp_path)
    assert verdict(place, "", "", "", solve=True) == SOLVED
    one_of_three = verdict(place, "echo one > state", "true", "rm -f state")
    assert (one_of_three.reward, one_of_three.passed) == (pytest.approx(1 / 3), False)


def test_the_last_step_alone_counts_under_final(tmp_path):
    assert verdict(folders.steps(tmp_path, strategy="final"), "echo one > state", "echo two > state", "rm state") == SOLVED
    assert verdict(folders.steps(tmp_path / "again", strategy="final"), "echo one > state") == UNSOLVED


def test_a_step_below_its_least_reward_ends_the_task(tmp_path):
    environment = harbor(folders.steps(tmp_path))
    task = environment.tasks[0]
    from sandmill.sandboxes import Sandbox

    async def first_step(script):
        async with await Sandbox.from_spec.aio(await sandbox_for(environment, task), server="") as sandbox:
            await environment.prepare(task, sandbox)
            await sandbox.run.aio("bash", "-c", script, timeout=30)
            said = await environment.next_message(task, Submission(answer="done"), sandbox)
            return said, [entry.name for entry in await sandbox.list.aio("/app")]

    assert on_loop(first_step("true")) == (None, [])
    assert on_loop(first_step("echo one > state")) == ("Step two.", ["given", "made", "setup.sh", "state"])


def test_a_verifier_in_an_environment_of_its_own_sees_artifacts_only(tmp_path):
    place = simple(tmp_path, 'ls /app; [ "$(cat /given/out.txt)" = made ] && [ ! -e /app/seed.txt ] && echo 1 > /logs/verifier/reward.txt')
    (place / "tests" / "Dockerfile").write_text("FROM ubuntu\nWORKDIR /work\n")
    (place / "task.toml").write_text(
        'artifacts = [{source = "/app/results", destination = "/given", exclude = ["*.tmp"]}]\n[verifier]\nenvironment_mode = "separate"\n'
    )
    assert verdict(place, "mkdir results; echo made > results/out.txt; echo x > results/y.tmp; ln -s /etc results/etc") == SOLVED
    assert "neither" in failure(verdict(place, "mkdir results"))


def test_a_verifier_may_ask_for_another_user(tmp_path):
    place = simple(tmp_path, "id -u; [ $(id -u) = 1000 ] && echo 1 > /logs/verifier/reward.txt")
    (place / "task.toml").write_text('[verifier]\nuser = "user"\n')
    assert verdict(place) == SOLVED
    (place / "task.toml").write_text('[verifier]\nuser = "nosuch"\n')
    assert "the image has no user 'nosuch'" in failure(verdict(place))


TABLES = """
artifacts = ["/app/noted"]
[environment.env]
PLACE = "agent"
[verifier]
env = {WORD = "${SANDMILL_TEST_WORD}", OTHER = "${SANDMILL_TEST_UNSET:-fallen back}"}
[[verifier.collect]]
command = "echo collected > /app/noted"
[solution]
env = {ANSWER = "solved"}
"""


def test_variables_reach_what_they_are_for_and_evidence_is_collected_before_grading(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDMILL_TEST_WORD", "from here")
    wanted = '[ "$WORD $OTHER" = "from here fallen back" ] && [ "$(cat /app/noted /app/said)" = "$(printf "collected\\nsolved agent")" ]'
    place = simple(tmp_path, f"{wanted} && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt")
    (place / "solution" / "solve.sh").write_text('echo "$ANSWER $PLACE" > said\n')
    (place / "task.toml").write_text(TABLES)
    assert verdict(place, solve=True) == SOLVED
    assert verdict(place, 'echo "$ANSWER $PLACE" > said') == UNSOLVED


def test_a_health_check_that_fails_is_said(tmp_path):
    place = simple(tmp_path, "echo 1 > /logs/verifier/reward.txt")
    (place / "task.toml").write_text('[environment]\nhealthcheck = {command = "test -e /nothing", interval_sec = 0.01, retries = 2}\n')
    with pytest.raises(Exception, match="the health check of task greeting failed 2 times"):
        verdict(place)


def test_a_step_of_a_dockerfile_that_fails_says_what_can_be_done(tmp_path):
    place = simple(tmp_path, "true", environment__Dockerfile="FROM ubuntu\nWORKDIR /app\nRUN curl -fsS https://example.org\n")
    with pytest.raises(ImageError, match=r"line 3 of its Dockerfile, RUN: .*No network is given to RUN: name hosts in option build_hosts"):
        verdict(place)
    assert "neither" in failure(verdict(place, run="skip"))


def test_a_foreign_base_without_a_substitute_says_what_can_be_done(tmp_path):
    place = simple(tmp_path, "true")
    with pytest.raises(ImageError, match=r"line 1 of its Dockerfile, FROM: no image 'ubuntu:24.04' in the store.*option base"):
        verdict(place, base="")


def test_extra_packages_for_tests_come_from_a_folder(tmp_path):
    tools = tmp_path / "tools"
    (tools / "helpful-1.0.dist-info").mkdir(parents=True)
    (tools / "helpful-1.0.dist-info" / "METADATA").write_text("Name: helpful\nVersion: 1.0\n")
    (tools / "helpful.py").write_text("ANSWER = 42\n")
    place = folders.greeting(tmp_path / "tasks")
    script = (place / "tests" / "test.sh").read_text().replace("-w pytest-json", "-w helpful==1.0 -w pytest-json")
    (place / "tests" / "test.sh").write_text(script)
    (place / "tests" / "test_outputs.py").write_text("import helpful\n\ndef test_it():\n    assert helpful.ANSWER == 42\n")
    assert "could not install helpful==1.0" in failure(verdict(place))
    assert verdict(place, tools=str(tools)) == SOLVED
