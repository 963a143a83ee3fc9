"""GRPO trains on environments of every format: a few steps with the tiny model that reads characters, no episode lost.

Installs what the other files here install.
"""

import json
import subprocess
import sys

import pytest
import yaml
from projects import write
from test_nemo_gym import REQUIREMENTS
from test_openenv import project as openenv_project
from test_verifiers_turns import SOURCE as TURNS
from test_verifiers_v1 import SOURCE as TASKSET

from sandmill.reports.metrics import read_run

__all__ = ["openenv_project"]

MODULE = """
SPLITS = ("train", "heldout")

def tasks(split):
    for n in range(50):
        yield {"prompt": f"{split} {n} + 1?", "answer": str(n + 1)}

def reward(completion, answer):
    return 1.0 if completion.strip() == answer else len(completion) % 7 / 10
"""
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 5 / 4
"""
TASK = '[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 30.0\n[agent]\ntimeout_sec = 60.0\n'
VERIFY = "#!/bin/bash\nif test -e out; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def harbor(folder):
    for number in range(6):
        task = folder / f"t{number}"
        for name in ("environment", "tests", "solution"):
            (task / name).mkdir(parents=True)
        (task / "task.toml").write_text(TASK)
        (task / "instruction.md").write_text(f"make a file, {number}\n")
        (task / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
        (task / "solution" / "solve.sh").write_text("touch out\n")
        (task / "tests" / "test.sh").write_text(VERIFY)
    return {"name": f"harbor:{folder}", "options": {"base": "host"}}


def verl(folder):
    rows = [
        {"data_source": "own", "prompt": [{"role": "user", "content": f"count to {n}"}], "reward_model": {"ground_truth": str(n)}}
        for n in range(8)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(SCORE)
    return {"name": f"verl/{folder}/train.jsonl", "options": {"reward": f"{folder}/score.py"}}


def module(folder):
    (folder / "sums.py").write_text(MODULE)
    return {"name": f"python/{folder}/sums.py"}


FORMATS = {
    "python": module,
    "verl": verl,
    "harbor": harbor,
    "reasoning-gym": lambda _: {"name": "reasoning-gym/gcd@0.1.25"},
    "verifiers v0": lambda folder: {"name": f"verifiers/{write(folder, 'sm-turns', TURNS)}", "options": {"verifiers": "0.1.14"}},
    "verifiers v0, whole groups": lambda folder: {"name": f"verifiers/{write(folder, 'sm-turns', TURNS)}", "options": {"kind": "group"}},
    "verifiers v1": lambda folder: {"name": f"verifiers-v1/{write(folder, 'sm-pad', TASKSET)}"},
    "TextArena": lambda _: {"name": "textarena/GuessTheNumber-v0@0.7.4"},
    "NeMo Gym": lambda _: {"name": "nemo-gym/reasoning_gym@0.7.0", "options": {"requirements": list(REQUIREMENTS)}},
}


def trained(tmp_path, environment):
    """What two steps of a training on it came to."""
    spec = {
        "model": {"uri": "sandmill/tiny-text"},
        "environment": {"trainTasks": 3, "heldOutTasks": 2, **environment},
        "parameters": {"steps": 2, "batchSize": 2, "numGenerations": 4, "maxTurns": 2, "maxCompletionLength": 12},
        "evaluation": {"baseline": False, "final": True, "greedy": False},
        "resources": {"contextLength": 2048},
        "grading": {"timeout": "120s"},
    }
    manifest = tmp_path / "run.yaml"
    manifest.write_text(yaml.safe_dump({"spec": spec}))
    command = [sys.executable, "-m", "sandmill.cli", "train", str(manifest), "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return read_run(tmp_path / "run")


def check(record):
    assert [step.step for step in record.steps] == [1, 2]
    assert [(step.episodes, step.failures) for step in record.steps] == [(8, 0), (8, 0)]
    assert all(evaluation.failures == 0 for evaluation in record.evaluations)


@pytest.mark.parametrize("kind", FORMATS)
def test_two_steps_without_a_lost_episode(kind, tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    check(trained(tmp_path, FORMATS[kind](folder)))


def test_two_steps_on_a_project_of_openenv_init(openenv_project, tmp_path):
    check(trained(tmp_path, {"name": f"openenv/{openenv_project}@0.10.0"}))
