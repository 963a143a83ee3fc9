"""Held-out evaluation: splits in, one row per split and way of sampling out. Also `sandmill eval`, outside any training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sandmill.accounts.ledger import Activity
from sandmill.rollouts.events import EvaluationFinished, EvaluationPhase, RunStage, StageChanged
from sandmill.rollouts.group import run_groups
from sandmill.training.assembly import on_loop
from sandmill.training.summaries import evaluation_finished

if TYPE_CHECKING:
    from sandmill.training.run import Run


def evaluate_splits(run: Run, phase: EvaluationPhase) -> tuple[EvaluationFinished, ...]:
    """Evaluates every split of the manifest, sampled and (where asked) greedily. Weights and task order stay as they are."""
    ways = (False, True) if run.manifest.spec.evaluation.greedy else (False,)
    return tuple(evaluate_split(run, split, phase, greedy=greedy) for split in run.manifest.spec.evaluation.splits for greedy in ways)


def evaluate_split(run: Run, split: str, phase: EvaluationPhase, *, greedy: bool) -> EvaluationFinished:
    """Evaluates one split: every task, `samplesPerTask` times (once when greedy)."""
    spec = run.manifest.spec
    tasks = run.parts.environment.splits[split]
    samples = 1 if greedy else spec.evaluation.samples_per_task
    way = "greedy" if greedy else "sampled"
    run.listener.on_event(StageChanged(stage=RunStage.EVALUATING, total=len(tasks) * samples, detail=f"{split}, {way}"))
    start = time.monotonic()
    groups = on_loop(
        run_groups(
            run.parts.arena,
            [(f"{phase}-{run.step}-{split}-{way}-{index}", task) for index, task in enumerate(tasks)],
            generations=samples,
            sampling=run.parts.sampling(greedy=greedy),
            breaker=run.breaker,
            watch=run.recorder.watch(Activity.EVALUATION, step=run.step, total=len(tasks) * samples),
        )
    )
    row = evaluation_finished(
        groups,
        split=split,
        phase=phase,
        step=run.step,
        greedy=greedy,
        seconds=time.monotonic() - start,
        at_s=run.recorder.elapsed_s,
        temperature=spec.parameters.sampling.temperature,
        policy_version=run.learner.version,
    )
    run.recorder.evaluation(groups, row)
    run.check_graders()
    return row
