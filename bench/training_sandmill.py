"""Sandmill's side of the training benchmark: the synchronous loop as `sandmill train` runs it, real sandboxes included."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
from training_workload import Measured, Workload, read, register

from sandmill.config.manifest import (
    CheckpointSection,
    EvaluationSection,
    LoraSection,
    Manifest,
    ModelSection,
    Parameters,
    ResourcesSection,
    SandboxSection,
    Spec,
)
from sandmill.rollouts.events import EpisodeRecord, Silent, StepFinished
from sandmill.store import RunFolder, Stream
from sandmill.training.synchronous import train


def manifest(workload: Workload) -> Manifest:
    rows = workload.batch_size * workload.num_generations
    return Manifest(
        spec=Spec(
            model=ModelSection(uri=workload.folder, dialogue=workload.dialogue),
            environment=workload.section,
            parameters=Parameters(
                steps=workload.steps,
                batch_size=workload.batch_size,
                num_generations=workload.num_generations,
                micro_batch_size=workload.micro_batch_size,
                learning_rate=workload.learning_rate,
                max_completion_length=workload.max_completion_length,
                max_turns=workload.max_turns,
                seed=workload.seed,
                lora=LoraSection(r=workload.lora_r, alpha=workload.lora_alpha, top_layers=workload.top_layers),
            ),
            evaluation=EvaluationSection(baseline=False, final=False),
            sandbox=SandboxSection(memory="256Mi", disk="16Mi", max_observation=workload.max_observation),
            resources=ResourcesSection(
                max_in_flight=rows, max_sandboxes=rows, threads=workload.threads, context_length=workload.context_length
            ),
            checkpoint=CheckpointSection(every=10_000),
        )
    )


def measure(workload: Workload) -> Measured:
    with tempfile.TemporaryDirectory(prefix="bench-sandmill-") as root:
        summary = train(manifest(workload), Path(root) / "run", resume=False, listener=Silent())
        run = RunFolder.open(Path(root) / "run")
        steps = list(run.rows(Stream.METRICS, StepFinished))
        episodes = list(run.rows(Stream.TRAJECTORIES, EpisodeRecord))
    first = workload.warm_up + 1
    kept = [step for step in steps if step.step >= first]
    trained = {step.step: 0 for step in kept}
    commands = {step.step: 0 for step in kept}
    for record in episodes:
        if record.step in trained:
            trained[record.step] += record.episode.trajectory.sampled_count if record.advantage else 0
            commands[record.step] += len(record.episode.trajectory.commands)
    at = {step.step: step.at_s for step in steps}
    return Measured(
        side="sandmill",
        seconds=tuple(step.at_s - at[step.step - 1] for step in kept),
        sampled_tokens=tuple(step.sampled_tokens for step in kept),
        trained_share=tuple(trained[step.step] / max(1, step.sampled_tokens) for step in kept),
        turns=tuple(step.turns for step in kept),
        commands=tuple(commands.values()),
        peak_rss_bytes=summary.peak_rss_bytes,
        parts={part: statistics.median(step.seconds.get(part, 0.0) for step in kept) for part in kept[0].seconds},
    )


if __name__ == "__main__":
    register()
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(measure(read(sys.argv[1]))))
