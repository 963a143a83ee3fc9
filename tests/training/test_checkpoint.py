"""Checkpoints: atomic under kill -9, verified on load, bit-exact on resume, readable by plain transformers + peft."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from training_policies import LlamaPolicy, group_of, tiny_llama, turn

from sandmill.config.manifest import EnvironmentSection, Manifest, ModelSection, Parameters, Spec
from sandmill.errors import CheckpointCorrupt, RunIncompatible
from sandmill.store import RunFolder, Stream
from sandmill.training.checkpoint import CheckpointState, checkpoints, export_adapter, load_checkpoint, restore, save_checkpoint
from sandmill.training.learner import Learner, StepStats

ROOT = Path(__file__).parents[2]
PARAMETERS = Parameters(steps=6, learning_rate=0.01)
MANIFEST = Manifest(
    spec=Spec(model=ModelSection(uri="test/tiny"), environment=EnvironmentSection(name="test@1.0.0"), parameters=PARAMETERS)
)
DIGESTS = {"environment_digest": "e" * 64, "model_digest": "m" * 64}


class Metric(msgspec.Struct, frozen=True):
    step: int
    stats: StepStats


def state_at(step: int) -> CheckpointState:
    return CheckpointState(step=step, trained_positions=tuple(range(step)), seeds={"sampling": 3}, **DIGESTS)


def step_groups(step: int):
    """Deterministic episodes of one step; not on policy, which training does not mind."""
    source = random.Random(step)
    members = [(float(i % 2), [turn([1, source.randrange(23)], [source.randrange(23) for _ in range(3)], [-3.0] * 3)]) for i in range(4)]
    return [group_of(f"s{step}", members)]


def train(path: Path, *, slow: float = 0.0) -> None:
    """The loop in small: create or resume, step, record, checkpoint every step, export."""
    policy = LlamaPolicy(torch.float32)
    learner = Learner(policy, PARAMETERS)
    resuming = (path / "format").exists()
    with (RunFolder.resume if resuming else RunFolder.create)(path, MANIFEST) as run:
        state = restore(run, learner, **DIGESTS)
        for step in range(state.step + 1 if state else 1, PARAMETERS.steps + 1):
            stats = learner.step(step_groups(step))
            run.append(Stream.METRICS, Metric(step, msgspec.structs.replace(stats, seconds=0.0)))
            time.sleep(slow)
            run.append(Stream.TRAJECTORIES, step_groups(step)[0])
            save_checkpoint(run, state_at(step), policy, learner, keep=2)
        export_adapter(run, policy)


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", MANIFEST) as folder:
        yield folder


@pytest.fixture
def trained():
    policy = LlamaPolicy(torch.float32)
    learner = Learner(policy, PARAMETERS)
    learner.step(step_groups(1))
    return policy, learner


def spawn(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}", "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-W", "ignore", "-c", f"import os, sys\nfrom pathlib import Path\nfrom test_checkpoint import *\n{code}"]
    return subprocess.Popen([*command, *map(str, arguments)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_checkpoint_restores_learner_policy_and_streams(run, trained):
    policy, learner = trained
    run.append(Stream.METRICS, Metric(1, learner.step(step_groups(2))))
    folder = save_checkpoint(run, state_at(2), policy, learner, keep=2)
    saved = learner.state_dict()
    run.append(Stream.METRICS, Metric(2, learner.step(step_groups(3))))
    state = restore(run, learner, **DIGESTS)
    assert state == msgspec.structs.replace(state_at(2), offsets=state.offsets)
    assert [row.step for row in run.rows(Stream.METRICS, Metric)] == [1]
    assert all(torch.equal(value, saved[key]) for key, value in learner.state_dict().items())
    check = subprocess.run(["sha256sum", "-c", "--quiet", "MANIFEST"], cwd=folder, check=False)
    assert check.returncode == 0


def test_only_the_newest_are_kept(run, trained):
    for step in (9, 10, 11, 1_000_000):
        save_checkpoint(run, state_at(step), *trained, keep=3)
    assert [path.name for path in checkpoints(run.path)] == ["step-000010", "step-000011", "step-1000000"]
    assert not list((run.path / "checkpoints").glob(".*"))


def test_a_step_can_be_saved_again(run, trained):
    for _ in range(2):
        save_checkpoint(run, state_at(3), *trained, keep=2)
    assert load_checkpoint(checkpoints(run.path)[0]).state.step == 3


@pytest.mark.parametrize("name", ["state.json", "learner.safetensors", "adapter/adapter_model.safetensors", "MANIFEST"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "absent"])
def test_damage_is_named_with_the_newest_good_checkpoint(run, trained, name, damage):
    for step in (1, 2, 3):
        save_checkpoint(run, state_at(step), *trained, keep=3)
    for folder in checkpoints(run.path)[1:]:
        target = folder / name
        content = target.read_bytes()
        middle = len(content) // 2
        if damage == "absent":
            target.unlink()
        else:
            target.write_bytes(content[:middle] if damage == "truncated" else content[:9] + b"\x00" + content[10:])
    with pytest.raises(CheckpointCorrupt) as caught:
        restore(run, trained[1], **DIGESTS)
    folder = checkpoints(run.path)[2]
    damaged = folder / ("" if name == "MANIFEST" and damage == "changed" else name)
    assert str(damaged) in str(caught.value)
    assert f"remove {folder} and --resume goes on from step-000001" in str(caught.value)
    shutil.rmtree(folder)
    shutil.rmtree(checkpoints(run.path)[1])
    assert restore(run, trained[1], **DIGESTS).step == 1


def test_no_good_checkpoint_is_said(run, trained):
    folder = save_checkpoint(run, state_at(1), *trained, keep=3)
    (folder / "state.json").write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match="no other checkpoint is whole"):
        load_checkpoint(folder)


@pytest.mark.parametrize(("key", "what"), [("environment_digest", "environment"), ("model_digest", "base model")])
def test_another_environment_or_base_model_is_refused(run, trained, key, what):
    save_checkpoint(run, state_at(1), *trained, keep=2)
    run.append(Stream.METRICS, Metric(1, trained[1].step(step_groups(2))))
    with pytest.raises(RunIncompatible, match=rf"another {what} \(digest {DIGESTS[key][:12]} then, ffffffffffff now\)"):
        restore(run, trained[1], **{**DIGESTS, key: "f" * 64})
    assert len(list(run.rows(Stream.METRICS, Metric))) == 1


def test_a_run_without_checkpoint_starts_over(run, trained):
    run.append(Stream.METRICS, Metric(1, trained[1].step(step_groups(2))))
    assert restore(run, trained[1], **DIGESTS) is None
    assert (run.path / "metrics.jsonl").stat().st_size == 0


def test_a_full_disk_while_saving_leaves_the_older_checkpoint(tmp_path, trained):
    """The child may write files of 4 KiB, then of 12 KiB at most: first the adapter does not fit, then the moments do not."""
    path = tmp_path / "run"
    with RunFolder.create(path, MANIFEST) as run:
        save_checkpoint(run, state_at(1), *trained, keep=2)
    code = """
import resource
from sandmill.errors import DiskFull
policy = LlamaPolicy(torch.float32)
learner = Learner(policy, PARAMETERS)
with RunFolder.resume(Path(sys.argv[1]), MANIFEST) as run:
    restore(run, learner, **DIGESTS)
    for limit in (4096, 12288):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            save_checkpoint(run, state_at(2), policy, learner, keep=2)
        except DiskFull as error:
            print(error, os.listdir(run.path / "checkpoints"))
"""
    saver = spawn(code, path)
    output, errors = saver.communicate(timeout=120)
    assert saver.returncode == 0, errors
    assert len(output.splitlines()) == 2
    for line in output.splitlines():
        assert f"no space left to write {path / 'checkpoints/step-000002'}" in line
        assert "the checkpoints before it are intact" in line
        assert line.endswith("['step-000001']")
    assert load_checkpoint(path / "checkpoints/step-000001").state.step == 1


WRITE_FOREVER = """
policy = LlamaPolicy(torch.float32)
learner = Learner(policy, PARAMETERS)
first = int(sys.argv[2])
for line in sys.stdin:
    if os.fork():
        os.wait()
        continue
    print(os.getpid(), flush=True)
    with RunFolder.resume(Path(sys.argv[1]), MANIFEST) as run:
        state = restore(run, learner, **DIGESTS)
        for step in range(state.step + 1 if state else 1, 10_000):
            run.append(Stream.TRAJECTORIES, step_groups(step)[0])
            save_checkpoint(run, state_at(step), policy, learner, keep=2)
    os._exit(1)
"""


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """25 writers die at random moments of saving, pruning or resuming; each time the newest checkpoint loads and none is lost."""
    path = tmp_path / "run"
    RunFolder.create(path, MANIFEST).close()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}"}
    code = f"import os, sys\nfrom pathlib import Path\nfrom test_checkpoint import *\n{WRITE_FOREVER}"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, path, "1"], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as nursery:
        moments = random.Random(8)
        newest = 0
        for _ in range(25):
            nursery.stdin.write("go\n")
            nursery.stdin.flush()
            writer = int(nursery.stdout.readline())
            time.sleep(moments.uniform(0.0, 0.4))
            os.kill(writer, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while Path(f"/proc/{writer}").exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            found = checkpoints(path)
            if found:
                checkpoint = load_checkpoint(found[-1])
                assert checkpoint.state.step >= newest
                newest = checkpoint.state.step
            assert newest == 0 or found
        nursery.stdin.close()
    assert newest > 5


def test_a_run_killed_again_and_again_ends_bit_identical_to_one_that_was_not(tmp_path):
    train(tmp_path / "straight")
    for delay in (0.6, 1.5):
        victim = spawn("print('ready', flush=True); train(Path(sys.argv[1]), slow=0.3)", tmp_path / "killed")
        assert victim.stdout.readline() == "ready\n"
        time.sleep(delay)
        victim.kill()
        victim.communicate(timeout=30)
    finisher = spawn("train(Path(sys.argv[1]))", tmp_path / "killed")
    _, errors = finisher.communicate(timeout=120)
    assert finisher.returncode == 0, errors
    names = sorted(str(path.relative_to(tmp_path / "straight")) for path in (tmp_path / "straight").rglob("*") if path.is_file())
    assert "checkpoints/step-000006/learner.safetensors" in names
    assert names == sorted(str(path.relative_to(tmp_path / "killed")) for path in (tmp_path / "killed").rglob("*") if path.is_file())
    for name in names:
        if name != "lock":
            assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def test_the_exported_adapter_loads_in_plain_transformers_and_peft(run, trained):
    policy, _ = trained
    export_adapter(run, policy)
    folder = export_adapter(run, policy)
    base = tiny_llama()
    base.save_pretrained(run.path / "base")
    loaded = PeftModel.from_pretrained(type(base).from_pretrained(run.path / "base"), folder)
    ids, select = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[False, True, True, True]])
    logits = loaded(input_ids=ids).logits[0, :3]
    plain = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(plain, policy.score(ids, torch.tensor([4]), select, 1.0).logprobs_K)
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors"]
