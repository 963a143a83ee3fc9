"""`sandmill env check` as people type it: lines, JSON, exit codes; and that training then refuses what failed."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "environments" / "formats"))
import harbor_folders as folders

FORGEABLE = "#!/bin/bash\n[ -e /app/seed.txt ] && echo 1 > /logs/verifier/reward.txt\n"
MANIFEST = """
apiVersion: sandmill.dev/v1
kind: TrainingJob
metadata: {{name: own}}
spec:
  model: {{uri: sandmill/tiny-shell}}
  environment:
    name: "harbor:{place}"
    trainTasks: 1
    heldOutTasks: 1
    options: {{base: host}}
"""


@pytest.fixture
def tasks(tmp_path):
    place = tmp_path / "tasks"
    folders.scores(place)
    folders.greeting(place, verifier=FORGEABLE, name="forgeable")
    return place


def test_each_task_has_its_line_and_a_bad_one_an_exit_code(sandmill, tasks):
    done = sandmill("env", "check", f"harbor:{tasks}", "--option", "base=host", "--times", "2")
    assert done.returncode == 3, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("forgeable  forgeable: untouched passes with reward 1")
    assert lines[1].startswith("scores  sound (2 of ")
    assert lines[2].startswith("1 of 2 sound on ")
    again = sandmill(
        "env", "check", f"harbor:{tasks}", "--option", "base=host", "--task", "scores", "--times", "1", "--no-cheats", "--json"
    )
    assert again.returncode == 0
    found = json.loads(again.stdout)
    assert list(found["tasks"]) == ["scores"]
    assert [trial["what"] for trial in found["tasks"]["scores"]["trials"]] == ["reference solution", "untouched"]


def test_training_refuses_what_failed(sandmill, tasks):
    manifest = tasks.parent / "run.yaml"
    manifest.write_text(MANIFEST.format(place=tasks))
    assert sandmill("env", "check", manifest, "--no-cheats").returncode == 3
    done = sandmill("train", manifest)
    assert done.returncode == 2
    assert b"1 task(s) of harbor:tasks failed `sandmill env check`" in done.stderr
    assert b"such as forgeable: untouched passes with reward 1" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["harbor:/nowhere"], b"/nowhere: there is no such folder"),
        (["harbor"], b"there is no environment 'harbor'"),
        (["harbor:/nowhere", "--option", "base"], b"it takes KEY=VALUE"),
    ],
)
def test_what_cannot_be_checked_is_said_in_one_sentence(sandmill, words, said):
    done = sandmill("env", "check", *words)
    assert done.returncode in (2, 3)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
