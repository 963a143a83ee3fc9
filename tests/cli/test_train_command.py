"""`sandmill train` and `eval` for real: a tiny model, real sandboxes, real signals."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

DEADLINE_S = 180.0

MANIFEST = """\
spec:
  model: {uri: sandmill/tiny-shell}
  environment: {name: shell@1.0.0, trainTasks: 16, heldOutTasks: 16}
  warmStart: {steps: 3, batchSize: 8}
  parameters: {steps: 2, batchSize: 2, numGenerations: 2, maxCompletionLength: 8, learningRate: 0.002}
  evaluation: {splits: [heldout], samplesPerTask: 2}
  resources: {maxInFlight: 32, maxSandboxes: 8, threads: 1}
  sandbox: {memory: 64Mi, disk: 4Mi}
"""


@pytest.fixture
def ready(sandmill):
    """The command in a folder with a manifest and sandboxes of its own."""
    sandmill.env["SANDMILL_STATE"] = str(sandmill.folder / "state")
    (sandmill.folder / "tiny.yaml").write_text(MANIFEST)
    return sandmill


def events(output):
    return [json.loads(line) for line in output.splitlines()]


def test_a_run_from_manifest_to_report_and_its_evaluation(ready):
    done = ready("train", "tiny.yaml", "--run", "out", timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    said = done.stdout.decode()
    assert "step 2/2  reward" in said
    assert "heldout  sampled" in said
    assert "cost    unknown" in said
    assert "peak memory" in said
    for name in ("manifest.json", "metrics.jsonl", "trajectories.jsonl", "evaluations.jsonl", "ledger.jsonl", "report.html", "adapter"):
        assert (ready.folder / "out" / name).exists(), name

    told = ready("eval", "out", "--greedy", "--split", "unseen", "--json", timeout=DEADLINE_S)
    assert told.returncode == 0, told.stderr.decode()
    rows = [event for event in events(told.stdout) if event["event"] == "evaluation-finished"]
    assert [(row["split"], row["greedy"], row["phase"], row["step"]) for row in rows] == [("unseen", True, "alone", 2)]
    assert os.path.isfile(ready.folder / events(told.stdout)[-1]["report"])

    again = ready("train", "tiny.yaml", "--run", "out")
    assert again.returncode == 6
    assert b"already holds a run" in again.stderr
    other = ready("train", "tiny.yaml", "--run", "out", "--resume", "--set", "spec.parameters.seed=9")
    assert other.returncode == 6
    assert b"spec.parameters.seed" in other.stderr


def test_json_is_events_and_nothing_else(ready):
    done = ready("train", "tiny.yaml", "--json", "--set", "spec.evaluation.baseline=false", timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr.decode()
    told = events(done.stdout)
    kinds = {event["event"] for event in told}
    assert kinds >= {"stage-changed", "episode-finished", "step-finished", "evaluation-finished", "checkpoint-saved"}
    assert told[-1]["event"] == "run-finished"
    assert told[-1]["run"].startswith("runs/tiny-")
    assert told[-1]["summary"]["cost_microusd"] is None


def until_step(started, step):
    """Reads events until a training step is finished."""
    end = time.monotonic() + DEADLINE_S
    for line in started.stdout:
        assert time.monotonic() < end
        event = json.loads(line)
        if event["event"] == "step-finished" and event["step"] >= step:
            return
    pytest.fail(f"the run ended before step {step}: {started.stderr.read()}")


def test_ctrl_c_finishes_the_step_and_resume_ends_as_if_nothing_had_happened(ready):
    changes = ["--set", "spec.parameters.steps=12", "--set", "spec.evaluation.baseline=false", "--set", "spec.evaluation.final=false"]
    with ready.start("train", "tiny.yaml", "--run", "cut", "--json", *changes) as started:
        until_step(started, 2)
        started.send_signal(signal.SIGINT)
        rest = events(started.stdout.read())
        assert started.wait(DEADLINE_S) == 130
        said = started.stderr.read().decode()
    done = rest[-1]["summary"]["steps_done"]
    assert 2 <= done < 12
    assert f"stopped after step {done} of 12, everything is saved; go on with: sandmill train tiny.yaml --resume --run cut" in said
    resumed = ready("train", "tiny.yaml", "--resume", "--run", "cut", "--json", *changes, timeout=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr.decode()
    assert next(event["step"] for event in events(resumed.stdout) if event["event"] == "step-finished") == done + 1
    whole = ready("train", "tiny.yaml", "--run", "whole", *changes, timeout=DEADLINE_S)
    assert whole.returncode == 0, whole.stderr.decode()
    cut, straight = (load_file(ready.folder / name / "adapter" / "adapter_model.safetensors") for name in ("cut", "whole"))
    assert cut.keys() == straight.keys()
    assert all(torch.equal(cut[name], straight[name]) for name in cut)


def test_ctrl_c_in_the_warm_start_stops_between_two_of_its_steps(ready):
    changes = ["--set", "spec.warmStart.steps=40", "--set", "spec.parameters.steps=0", "--set", "spec.evaluation.baseline=false"]
    with ready.start("train", "tiny.yaml", "--run", "cut", "--json", *changes) as started:
        for line in started.stdout:
            if json.loads(line)["event"] == "stage-advanced":
                break
        started.send_signal(signal.SIGINT)
        steps = [event["done"] for event in events(started.stdout.read()) if event["event"] == "stage-advanced"]
        assert started.wait(DEADLINE_S) == 130
        assert b"stopped before the first step; a resumed run begins again; go on with: sandmill train" in started.stderr.read()
    assert max(steps, default=0) < 40
    resumed = ready("train", "tiny.yaml", "--resume", "--run", "cut", *changes, timeout=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr.decode()


def test_ctrl_c_while_the_model_loads_evaluates_nothing_and_can_be_resumed(ready):
    with ready.start("train", "tiny.yaml", "--run", "cut", "--json", "--set", "spec.warmStart.steps=0") as started:
        first = json.loads(started.stdout.readline())
        while first.get("stage") != "loading":
            first = json.loads(started.stdout.readline())
        started.send_signal(signal.SIGINT)
        told = [event["event"] for event in events(started.stdout.read())]
        assert started.wait(DEADLINE_S) == 130
        assert b"stopped before the first step; a resumed run begins again" in started.stderr.read()
    assert "episode-finished" not in told
    resumed = ready("train", "tiny.yaml", "--resume", "--run", "cut", "--set", "spec.warmStart.steps=0", timeout=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr.decode()
    assert b"heldout sampled before: " in resumed.stdout


def test_ctrl_c_twice_stops_at_once_and_loses_nothing_that_was_saved(ready):
    changes = ["--set", "spec.parameters.steps=5000", "--set", "spec.checkpoint.every=1", "--set", "spec.evaluation.baseline=false"]
    with ready.start("train", "tiny.yaml", "--run", "cut", "--json", *changes) as started:
        until_step(started, 2)
        started.send_signal(signal.SIGINT)
        assert b"press Ctrl-C again" in started.stderr.readline()
        started.send_signal(signal.SIGINT)
        started.stdout.read()
        assert started.wait(DEADLINE_S) == 130
    report = ready("report", "cut", "--json")
    assert report.returncode == 0
    assert json.loads(report.stdout)["steps_done"] >= 2


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("spec.environment.name=shel@1.0.0", 3, "shell@1.0.0"),
        ("spec.model.uri=no/such/folder", 3, "no/such/folder"),
        ("spec.model.uri=sandmill/tiny-shel", 3, "did you mean sandmill/tiny-shell?"),
        ("spec.environment.trainTasks=10000000", 2, "at most 100,000 tasks of a split, not 10,000,000"),
        ("spec.evaluation.splits=[heldut]", 2, "--set spec.evaluation.splits=[heldut]: spec.evaluation.splits: shell@1.0.0 has no split"),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence(ready, change, code, said):
    done = ready("train", "tiny.yaml", "--json", "--set", change)
    assert done.returncode == code, done.stderr
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert ready("train", "tiny.yaml", "--preview", "--set", change).returncode in (2, 3)


def test_preview_starts_nothing_and_says_what_would_be(ready):
    done = ready("train", "tiny.yaml", "--preview")
    assert done.returncode == 0, done.stdout.decode()
    assert "training    8 episodes in 2 steps of 4" in done.stdout.decode()
    assert "nothing would stop this run" in done.stdout.decode()
    told = json.loads(ready("train", "tiny.yaml", "--preview", "--json").stdout)
    assert told["evaluation_episodes"] == 16 * (2 + 1) * 2
    assert told["estimate"] is None
    assert told["notes"] == []
    (note,) = json.loads(ready("train", "tiny.yaml", "--preview", "--json", "--set", "spec.warmStart.steps=0").stdout)["notes"]
    assert note.startswith("sandmill/tiny-shell starts untrained and spec.warmStart.steps is 0")
    assert not (ready.folder / "runs").exists()
