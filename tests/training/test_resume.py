"""kill -9 at any point, then --resume: the result is the same, bit for bit, as that of a run nobody killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandmill.reports.metrics import read_episodes, read_run

MANIFEST = """
spec:
  model: {uri: sandmill/tiny-shell}
  environment: {name: shell@1.0.0, trainTasks: 24, heldOutTasks: 6}
  warmStart: {steps: 12, batchSize: 16}
  parameters: {steps: 6, batchSize: 3, numGenerations: 4, learningRate: 0.01, maxCompletionLength: 10, entropyBonus: 0.01}
  evaluation: {splits: [tuning], greedy: true, every: 3}
  checkpoint: {every: 2}
  sandbox: {memory: 64Mi, disk: 8Mi}
  resources: {maxInFlight: 12, maxSandboxes: 6}
"""


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifest") / "run.yaml"
    path.write_text(MANIFEST)
    return path


def command(manifest: Path, run: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "sandmill.cli", "train", str(manifest), "--run", str(run), "--json", *more]


@pytest.fixture(scope="module")
def whole(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(manifest, run), check=True, stdout=subprocess.DEVNULL, timeout=240)
    return run


def outcome(run: Path) -> dict[str, object]:
    """Everything about a run that time may not change."""
    record = read_run(run)
    return {
        "weights": {
            name: hashlib.sha256((run / name).read_bytes()).hexdigest()
            for name in ("adapter/adapter_model.safetensors", "base/model.safetensors")
        },
        "steps": [(row.step, row.reward, row.passed, row.loss, row.grad_norm, row.sampled_tokens) for row in record.steps],
        "evaluations": [(row.split, row.phase, row.step, row.greedy, row.tasks) for row in record.evaluations],
        "episodes": [
            (row.step, row.split, row.advantage, row.episode.group, row.episode.index, row.episode.trajectory.turns, row.episode.verdict)
            for row in read_episodes(run)
        ],
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_resumes_to_the_same_bits(seed: int, whole: Path, manifest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    draw = random.Random(seed)
    kills = 0
    for _ in range(12):
        resume = ("--resume",) if (run / "format").exists() else ()
        process = subprocess.Popen(command(manifest, run, *resume), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if kills < 3:
            wait_for_output(process, lines=draw.randint(1, 60))
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        process.communicate(timeout=240)
        if process.returncode == 0:
            break
    else:
        pytest.fail("the run did not finish in 12 starts")
    assert kills == 3
    assert outcome(run) == outcome(whole)


def wait_for_output(process: subprocess.Popen[bytes], *, lines: int) -> None:
    """Returns after so many events of the run, or when it has ended."""
    assert process.stdout is not None
    for _ in range(lines):
        if not process.stdout.readline():
            return
    time.sleep(0.05)


def test_resuming_a_finished_run_changes_nothing(whole: Path, manifest: Path) -> None:
    before = outcome(whole)
    subprocess.run(command(manifest, whole, "--resume"), check=True, stdout=subprocess.DEVNULL, timeout=240)
    assert outcome(whole) == before


def test_another_manifest_is_refused_with_the_key_named(whole: Path, manifest: Path) -> None:
    result = subprocess.run(
        command(manifest, whole, "--resume", "--set", "spec.parameters.learningRate=0.5"), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 6
    assert "spec.parameters.learningRate" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_adapter_loads_in_plain_transformers_and_peft(whole: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(whole / "base")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(whole / "base"), whole / "adapter")
    ids = tokenizer("Q: count the files\n", return_tensors="pt", add_special_tokens=False).input_ids
    assert model(ids).logits.isfinite().all()
