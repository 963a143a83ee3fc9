"""`sandmill env`: the real command on a state folder of the test's own (SANDMILL_STATE)."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(autouse=True)
def own_state(sandmill):
    sandmill.env["SANDMILL_STATE"] = str(sandmill.folder / "state")


def test_from_nothing_to_a_checked_environment_and_back(sandmill):
    made = sandmill("env", "init", "sums")
    assert made.returncode == 0, made.stderr
    assert made.stdout.decode().splitlines()[1:] == ["  sandmill env check python/sums", "  sandmill env run python/sums --answer 42"]
    checked = sandmill("env", "check", "python/sums", "--tasks", "2", "--json")
    assert json.loads(checked.stdout) == {"tasks": 4, "unanswered": 0, "findings": []}
    wrong = json.loads(sandmill("env", "run", "python/sums", "--answer", "0", "--json").stdout)
    assert (wrong["verdict"]["kind"], wrong["verdict"]["reward"], wrong["verdict"]["passed"]) == ("graded", 0.0, False)
    right = sandmill("env", "run", "python/sums", "--task", wrong["task"], "--expected")
    assert right.stdout.decode().endswith("\nreward 1, passed\n")
    shown = json.loads(sandmill("env", "show", "python/sums", "--examples", "2", "--json").stdout)
    assert (shown["name"], len(shown["examples"]), len(shown["digest"])) == ("python/sums", 2, 64)
    (installed,) = json.loads(sandmill("env", "list", "--json").stdout)["installed"]
    assert installed["references"] == ["python/sums"]
    assert b"python/sums" in sandmill("env", "list").stdout
    assert sandmill("env", "rm", "python/sums").stdout.startswith(b"removed python/sums, ")
    assert json.loads(sandmill("env", "list", "--json").stdout)["installed"] == []
    assert sandmill("env", "prune").stdout == b"removed 0 installed packages, 0 MB freed\n"


def test_an_unsound_environment_fails_the_check_by_name(sandmill):
    rows = "[{'prompt': f'{split} {n}', 'answer': 'a\\x1b[2J'} for n in range(9)]"
    source = f"def tasks(split):\n    return {rows}\ndef reward(c, a):\n    return True\n"
    (sandmill.folder / "yes.py").write_text(source)
    done = sandmill("env", "check", "python/yes.py", "--tasks", "1")
    assert done.returncode == 3
    assert b"accepts any answer" in done.stdout
    assert b"2 of 2 tasks are not sound" in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "resoning-gym/chain_sum@1"], 3, b"there is no format 'resoning-gym'; did you mean reasoning-gym/chain_sum@1?"),
        (["show", "python/nowhere"], 3, b"there is no file nowhere"),
        (
            ["run", "shell@1.0.0", "--answer", "x", "--task", "shell-train-0000"],
            2,
            b"there is no task 'shell-train-0000'; the nearest is shell-train-",
        ),
        (["show", "python/x.py", "-o", "memory"], 2, b"--option: it is KEY=VALUE, not 'memory'"),
        (["rm", "python/never"], 3, b"nothing is installed for"),
        (["init", "."], 2, b"environment.py: exists already"),
    ],
)
def test_what_is_wrong_is_one_sentence(sandmill, words, code, said):
    (sandmill.folder / "environment.py").write_text("")
    done = sandmill("env", *words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_built_in_environment_is_shown_and_run(sandmill):
    shown = json.loads(sandmill("env", "show", "shell@1.0.0", "--json").stdout)
    assert shown["tasks"]["train"] == 50
    done = json.loads(sandmill("env", "run", "shell@1.0.0", "--answer", "nothing", "--json").stdout)
    assert done["verdict"]["reward"] == 0.0


def test_the_built_in_environment_passes_its_own_check(sandmill):
    """Its answers count only with commands behind them, so the check works in a sandbox before it answers."""
    families = "families=[read, write, fix]"
    checked = sandmill("env", "check", "shell@1.0.0", "--tasks", "3", "-k", "1", "--json", "-o", families)
    assert json.loads(checked.stdout) == {"tasks": 6, "unanswered": 0, "findings": []}
    assert checked.returncode == 0
    for task in ("shell-train-00000", "shell-train-00001", "shell-train-00002"):
        own = sandmill("env", "run", "shell@1.0.0", "--task", task, "--expected", "--json", "-o", families)
        assert json.loads(own.stdout)["verdict"]["passed"], own.stdout


def test_a_name_means_one_content_for_ever(sandmill):
    sandmill("env", "init", "sums")
    added = sandmill("env", "add", "python/sums", "--as", "my-sums@1.0.0", "--json")
    assert json.loads(added.stdout)["name"] == "my-sums", added.stderr
    assert sandmill("env", "run", "my-sums@1.0.0", "--expected").stdout.endswith(b"\nreward 1, passed\n")
    (named,) = json.loads(sandmill("env", "list", "--json").stdout)["named"]
    assert (named["name"], named["version"], named["reference"], named["splits"]) == (
        "my-sums",
        "1.0.0",
        "python/sums",
        {"train": 2000, "heldout": 500},
    )
    options = sandmill("env", "run", "my-sums@1.0.0", "--expected", "-o", "passAt=0.5")
    assert (options.returncode, b"belong to its version" in options.stderr) == (2, True)
    near = sandmill("env", "show", "my-sum@1.0.0")
    assert (near.returncode, b"the nearest is my-sums@1.0.0" in near.stderr) == (3, True)
    place = sandmill.folder / "sums" / "environment.py"
    place.write_text(place.read_text().replace("1.0 if", "0.5 if"))
    changed = sandmill("env", "run", "my-sums@1.0.0", "--expected")
    assert (changed.returncode, b"is no longer what was added: python/sums has changed" in changed.stderr) == (3, True)
    again = sandmill("env", "add", "python/sums", "--as", "my-sums@1.0.0")
    assert (again.returncode, b"a version never changes" in again.stderr) == (2, True)
    assert sandmill("env", "add", "python/sums", "--as", "my-sums@1.1.0").returncode == 0
    assert sandmill("env", "rm", "my-sums@1.0.0").stdout.startswith(b"removed the name my-sums@1.0.0")
    assert sandmill("env", "add", "python/sums", "--as", "../evil@1").returncode == 2
