"""The loop under faults: whatever ends a run does so in one clear error, and what was saved goes on."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandmill.config.load import parse_manifest
from sandmill.config.manifest import Manifest
from sandmill.errors import ConfigError, DiskFull, EngineDied, EnvironmentFailed, ModelNotFound, RunBusy, UnknownEnvironment
from sandmill.models.engines.torch import TorchEngine
from sandmill.reports.metrics import read_episodes, read_run
from sandmill.rollouts.events import EpisodeFinished, EvaluationPhase, Event, InFlight, StepFinished, Warned
from sandmill.sandboxes import list_sandboxes
from sandmill.store import RunFolder
from sandmill.training.run import open_run
from sandmill.training.synchronous import train

SPEC = """
spec:
  model: {uri: sandmill/tiny-shell}
  environment: {name: shell@1.0.0, trainTasks: 12, heldOutTasks: 4}
  parameters: {steps: 4, batchSize: 2, numGenerations: 3, maxCompletionLength: 10, learningRate: 0.01}
  evaluation: {splits: [heldout], greedy: false}
  checkpoint: {every: 1}
  sandbox: {memory: 64Mi, disk: 8Mi}
  resources: {maxInFlight: 6, maxSandboxes: 4}
"""


def manifest(*overrides: str, text: str = SPEC) -> Manifest:
    return parse_manifest(text.encode(), overrides)


class Ear:
    """Remembers what it was told; asks to stop after `stop_after` steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.events: list[Event] = []
        self.stop_after = stop_after

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def should_stop(self) -> bool:
        return self.stop_after is not None and sum(isinstance(event, StepFinished) for event in self.events) >= self.stop_after

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not [record for record in list_sandboxes() if record.owner_pid == os.getpid()]


def test_a_share_of_right_demonstrations_is_refused_where_it_cannot_be_chosen(tmp_path: Path) -> None:
    asked = manifest("spec.warmStart.steps=1", "spec.warmStart.right=0.5")
    with pytest.raises(ConfigError, match=r"spec\.warmStart\.right: how often the demonstrations of shell@1\.0\.0 are right"):
        train(asked, tmp_path / "run", resume=False, listener=Ear())
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_everything_it_told(tmp_path: Path) -> None:
    ear = Ear()
    summary = train(manifest(), tmp_path / "run", resume=False, listener=ear)
    assert (summary.steps_done, summary.interrupted, summary.cost_microusd) == (4, False, None)
    record = read_run(tmp_path / "run")
    assert list(record.steps) == ear.of(StepFinished)
    assert [row.phase for row in record.evaluations] == [EvaluationPhase.BEFORE, EvaluationPhase.AFTER]
    episodes = list(read_episodes(tmp_path / "run"))
    assert len(episodes) == 4 * 6 + 2 * 4
    assert len(ear.of(EpisodeFinished)) == len(episodes)
    assert ear.of(InFlight)[-1] == InFlight(count=0)
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert len(ledger) == len(episodes) + 4 + 2


def test_a_stop_finishes_the_step_saves_and_can_be_resumed(tmp_path: Path) -> None:
    summary = train(manifest(), tmp_path / "run", resume=False, listener=Ear(stop_after=2))
    assert (summary.steps_done, summary.interrupted) == (2, True)
    summary = train(manifest(), tmp_path / "run", resume=True, listener=Ear())
    assert (summary.steps_done, summary.interrupted) == (4, False)
    assert [row.step for row in read_run(tmp_path / "run").steps] == [1, 2, 3, 4]


def test_a_cost_cap_stops_before_it_is_exceeded_and_raising_it_goes_on(tmp_path: Path) -> None:
    priced = 'prices: {machinePerHour: "3600", sandboxPerHour: "0"}\n  maxCostUSD: "{cap}"\n'
    ear = Ear()
    text = SPEC + "  " + priced.replace("{cap}", "4")
    summary = train(manifest("spec.parameters.steps=200", text=text), tmp_path / "run", resume=False, listener=ear)
    assert summary.interrupted
    assert 0 < summary.steps_done < 200
    assert summary.cost_microusd is not None
    assert summary.cost_microusd <= 4_000_000
    assert any("could exceed the cap" in event.sentence for event in ear.of(Warned))


def test_a_killed_engine_is_one_error_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, calls = TorchEngine.publish, itertools.count()

    def die_after_two_steps(self: TorchEngine, version: int) -> None:
        publish(self, version)
        if next(calls) == 2:
            monkeypatch.setattr(self._decoder, "extend", lambda *_: 1 / 0)

    monkeypatch.setattr(TorchEngine, "publish", die_after_two_steps)
    with pytest.raises(EngineDied, match="division by zero"):
        train(manifest(), tmp_path / "run", resume=False, listener=Ear())
    monkeypatch.setattr(TorchEngine, "publish", publish)
    assert train(manifest(), tmp_path / "run", resume=True, listener=Ear()).steps_done == 4


def test_a_grader_that_always_raises_stops_the_run_and_nothing_was_trained(tmp_path: Path) -> None:
    source = (Path(__file__).parent / "broken_grader.py").resolve()
    text = SPEC.replace("shell@1.0.0", f"'{source}:environment'") + "  grading: {maxConsecutiveFailures: 5}\n"
    ear = Ear()
    with pytest.raises(EnvironmentFailed, match="in a row"):
        train(manifest("spec.evaluation.baseline=false", text=text), tmp_path / "run", resume=False, listener=ear)
    assert not ear.of(StepFinished)
    assert all(event.failure == "grader" and event.reward is None for event in ear.of(EpisodeFinished))


def test_two_runs_on_one_folder_are_refused(tmp_path: Path) -> None:
    with open_run(manifest(), tmp_path / "run", resume=False, listener=Ear()), pytest.raises(RunBusy, match=str(os.getpid())):
        RunFolder.resume(tmp_path / "run", manifest())


def test_a_missing_model_or_environment_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no model folder"):
        train(manifest(f"spec.model.uri={tmp_path}/none"), tmp_path / "run", resume=False, listener=Ear())
    with pytest.raises(UnknownEnvironment, match=r"shell@1\.0\.0"):
        train(manifest("spec.environment.name=shel@1.0.0"), tmp_path / "run", resume=False, listener=Ear())
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_error_and_the_run_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """A real file system of 6 MB that fills up in the middle of the run."""
    disk = Path(tempfile.mkdtemp(dir=tmp_path))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], check=True)
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(2 << 20))
        with pytest.raises(DiskFull, match="no space left"):
            train(manifest("spec.parameters.steps=400"), disk / "run", resume=False, listener=Ear())
        done = read_run(disk / "run").steps[-1].step
        ballast.unlink()
        summary = train(manifest("spec.parameters.steps=400"), disk / "run", resume=True, listener=Ear(stop_after=2))
        assert summary.steps_done >= done - 1
        assert [row.step for row in read_run(disk / "run").steps] == list(range(1, summary.steps_done + 1))
    finally:
        subprocess.run(["umount", disk], check=True)
