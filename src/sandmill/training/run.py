"""A run being written: its folder, its parts, where it stands. In: a manifest and a folder, new or to be resumed; out: `Run`.

Order of opening: what a person wrote is checked and the model is loaded before a new folder is made; then the folder is locked, the
model warm-started, and engine and sandboxes start; closing undoes it in reverse, whatever happened.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from sandmill.accounts.caps import CostCap
from sandmill.accounts.ledger import read_ledger
from sandmill.accounts.prices import RunPrices
from sandmill.config.manifest import Manifest
from sandmill.environments.environment import Environment
from sandmill.errors import ConfigError, ModelError
from sandmill.models.loading import LoadedModel
from sandmill.rollouts.events import CheckpointSaved, Listener, RunStage, RunSummary, StageChanged
from sandmill.rollouts.group import Breaker
from sandmill.store import RunFolder, Stream
from sandmill.training.assembly import Parts, assemble, resolve_environment, torch_threads
from sandmill.training.base import load_base, ready_policy
from sandmill.training.checkpoint import CheckpointState, checkpoints, export_adapter, restore, save_checkpoint
from sandmill.training.learner import Learner
from sandmill.training.recorder import Recorder
from sandmill.training.settle import settle

_CAP_MARGIN = 2
"""A step may cost this many times the costliest one before it without exceeding the cap: other work on the machine makes steps longer."""


@dataclass(kw_only=True)
class Run:
    """The state of a run in progress. `step`: updates' steps done, skipped ones included."""

    manifest: Manifest
    folder: RunFolder
    parts: Parts
    learner: Learner
    recorder: Recorder
    listener: Listener
    breaker: Breaker
    cap: CostCap
    resumed: bool
    step: int
    saved_step: int | None
    costliest_step_microusd: int = field(default=0)
    _spent_before: int = field(default=0)
    _alarmed: set[str] = field(default_factory=set)

    def must_stop(self) -> bool:
        """Whether a person asked to stop, or the next step could exceed the cost cap."""
        if self.listener.should_stop():
            return True
        spent = self.recorder.spent_microusd
        if self.cap.limit_microusd is None or spent is None:
            return False
        self.costliest_step_microusd = max(self.costliest_step_microusd, spent - self._spent_before)
        self._spent_before = spent
        self.cap.spent_microusd = spent
        remaining = self.cap.remaining_microusd
        if remaining is not None and remaining < _CAP_MARGIN * self.costliest_step_microusd:
            self.recorder.warn(self.cap.reason(), step=self.step)
            return True
        return False

    def check_graders(self) -> None:
        """Raises EnvironmentFailed when the grader is broken; warns, once each, when all it ever said was zero and when it often failed."""
        self.parts.arena.check_grader()
        for about, sentence in self.parts.arena.health.alarms().items():
            if about not in self._alarmed:
                self.recorder.warn(sentence, step=self.step)
                self._alarmed.add(about)

    def save(self, *, if_due: bool) -> None:
        """Writes a checkpoint of the present step, unless there is one or (with `if_due`) the step is not a multiple of `every`."""
        settings = self.manifest.spec.checkpoint
        if self.saved_step == self.step or (if_due and self.step % settings.every):
            return
        state = CheckpointState(
            step=self.step,
            environment_digest=self.parts.environment.digest,
            model_digest=self.parts.loaded.digest,
            trained_positions=tuple(range(self.step * self.manifest.spec.parameters.batch_size)),
            seeds={"run": self.manifest.spec.parameters.seed},
            elapsed_s=self.recorder.elapsed_s,
        )
        path = save_checkpoint(self.folder, state, self.parts.policy, self.learner, keep=settings.keep)
        self.saved_step = self.step
        self.listener.on_event(CheckpointSaved(step=self.step, path=str(path)))

    def finish(self, summary: RunSummary) -> RunSummary:
        """Exports the adapter and keeps the summary."""
        self.listener.on_event(StageChanged(stage=RunStage.SAVING))
        export_adapter(self.folder, self.parts.policy)
        self.folder.write("summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        return summary


@contextlib.contextmanager
def open_run(manifest: Manifest, path: Path, *, resume: bool, listener: Listener) -> Iterator[Run]:
    """Opens a new run, or an existing one where it was last saved. Raises SandmillError; then nothing is left running."""
    spec = manifest.spec

    def report(line: str) -> None:
        listener.on_event(StageChanged(stage=RunStage.ENVIRONMENT, detail=line))

    report(spec.environment.name)
    environment = resolve_environment(spec, report)
    listener.on_event(StageChanged(stage=RunStage.LOADING))
    CostCap.of(spec.max_cost_usd, RunPrices.of(spec.prices))  # a cap that cannot be held is refused before anything is spent
    with contextlib.ExitStack() as closing:
        if resume:
            folder = closing.enter_context(RunFolder.resume(path, manifest))
        loaded = load_base(manifest, environment, path)
        if not resume:
            folder = closing.enter_context(RunFolder.create(path, manifest))
        try:
            run = _ready(manifest, environment, loaded, folder, listener, closing, resume=resume)
        except (ConfigError, ModelError):
            if not resume:
                shutil.rmtree(path)  # what a person wrote cannot work: the folder holds nothing yet that could be resumed
            raise
        yield run


def _ready(
    manifest: Manifest,
    environment: Environment,
    loaded: LoadedModel,
    folder: RunFolder,
    listener: Listener,
    closing: contextlib.ExitStack,
    *,
    resume: bool,
) -> Run:
    """Warm start, adapter, checkpoint, engine and sandboxes, in this order."""
    spec, prices = manifest.spec, RunPrices.of(manifest.spec.prices)
    starts = _starts(folder.path)
    torch.set_num_threads(torch_threads(spec, loaded))
    loaded, policy = ready_policy(manifest, environment, loaded, folder, listener, warm=not (resume and checkpoints(folder.path)))
    learner = Learner(policy, spec.parameters)
    state = restore(folder, learner, environment_digest=environment.digest, model_digest=loaded.digest) if resume else None
    recorder = Recorder(folder, listener, prices, start=starts, elapsed_s=state.elapsed_s if state else 0.0)
    parts = assemble(manifest, environment, loaded, policy)
    closing.callback(parts.close)
    parts.engine.publish(learner.version)
    settle()
    return Run(
        manifest=manifest,
        folder=folder,
        parts=parts,
        learner=learner,
        recorder=recorder,
        listener=listener,
        breaker=Breaker(spec.grading.max_consecutive_failures),
        cap=CostCap.of(spec.max_cost_usd, prices, recorder.spent_microusd),
        resumed=state is not None,
        step=state.step if state else 0,
        saved_step=state.step if state else None,
        _spent_before=recorder.spent_microusd or 0,
    )


def _starts(path: Path) -> int:
    """How many times the run was started before, as its ledger knows."""
    ledger = path / Stream.LEDGER
    return 1 + max((row.start for row in read_ledger(ledger)), default=-1) if ledger.exists() else 0
