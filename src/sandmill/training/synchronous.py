"""The synchronous loop: sample a step's groups, learn from them, publish, record; again. In: a manifest; out: a run folder.

Left out of the textbook method on purpose: no critic, no reference model (the clip and the adapter keep the policy near), one
update per batch. Every random choice derives from the run's seed and its place, so a run that is killed at any point and resumed
ends with the same bits as one that was not.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandmill.accounts.ledger import Activity
from sandmill.config.manifest import Manifest
from sandmill.errors import ConfigError
from sandmill.rollouts.events import EvaluationPhase, Listener, RunStage, RunSummary, StageAdvanced, StageChanged, StepPart
from sandmill.rollouts.group import run_groups
from sandmill.rollouts.trajectory import Group
from sandmill.training.assembly import Parts, on_loop
from sandmill.training.curriculum import tasks_of_step
from sandmill.training.evaluate import evaluate_splits
from sandmill.training.run import Run, open_run


def train(manifest: Manifest, folder: Path, *, resume: bool, listener: Listener) -> RunSummary:
    """Trains as the manifest says and writes the run to `folder`; see `RunSummary` for how it ended.

    A stop asked for through the listener, or a cost cap, ends the run after the step in hand, saved. Raises SandmillError.
    """
    started = time.monotonic()
    if manifest.spec.parameters.sampling.top_p < 1:
        raise ConfigError(
            "training needs topP 1: the ratio of an update is taken under the whole distribution", field="spec.parameters.sampling.topP"
        )
    with open_run(manifest, folder, resume=resume, listener=listener) as run:
        parts, learner, recorder = run.parts, run.learner, run.recorder
        evaluation, parameters = manifest.spec.evaluation, manifest.spec.parameters
        if run.step == 0 and not run.resumed and evaluation.baseline:
            evaluate_splits(run, EvaluationPhase.BEFORE)
        run.save(if_due=False)
        listener.on_event(StageChanged(stage=RunStage.TRAINING, total=parameters.steps))
        while run.step < parameters.steps and not run.must_stop():
            clock = StepClock()
            with clock.part(StepPart.ROLLOUT):
                groups = sample(run)
            run.check_graders()
            with clock.part(StepPart.TRAINING):
                stats = learner.step(groups)
            with clock.part(StepPart.PUBLISH):
                parts.engine.publish(learner.version)
            run.step += 1
            with clock.part(StepPart.SAVING):
                recorder.episodes(groups, parameters, step=run.step)
            recorder.step(groups, stats, parameters, step=run.step, seconds=clock.seconds)
            run.save(if_due=True)
            if evaluation.every and run.step % evaluation.every == 0 and run.step < parameters.steps:
                evaluate_splits(run, EvaluationPhase.DURING)
                listener.on_event(StageChanged(stage=RunStage.TRAINING, total=parameters.steps))
                listener.on_event(StageAdvanced(done=run.step))
        finished = run.step >= parameters.steps
        if finished and evaluation.final:
            evaluate_splits(run, EvaluationPhase.AFTER)
        run.save(if_due=False)
        return run.finish(
            RunSummary(
                run=str(folder),
                steps_done=run.step,
                steps=parameters.steps,
                interrupted=not finished,
                seconds=time.monotonic() - started,
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                cost_microusd=recorder.spent_microusd,
            )
        )


def sample(run: Run) -> tuple[Group, ...]:
    """The groups of the next step, every episode finished."""
    parts: Parts = run.parts
    parameters = parts.spec.parameters
    tasks = tasks_of_step(parts.environment.splits["train"], run.step, batch_size=parameters.batch_size, seed=parameters.seed)
    return on_loop(
        run_groups(
            parts.arena,
            tasks,
            generations=parameters.num_generations,
            sampling=parts.sampling(),
            breaker=run.breaker,
            watch=run.recorder.watch(Activity.EPISODE, step=run.step + 1, total=parameters.batch_size * parameters.num_generations),
        )
    )


class StepClock:
    """Wall-clock seconds of one step by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, part: StepPart) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part.value] = self.seconds.get(part.value, 0.0) + time.monotonic() - start
