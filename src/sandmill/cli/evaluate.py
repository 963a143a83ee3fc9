"""`sandmill eval FILE.yaml|RUN`: a manifest or a trained run in; an evaluation with its own run folder and report out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sandmill.cli.progress import Display, json_line, listening
from sandmill.cli.train import RUNS, finish, new_run
from sandmill.config.load import load_manifest, override_manifest
from sandmill.config.manifest import Manifest
from sandmill.errors import ConfigError, RunError
from sandmill.reports.metrics import read_run
from sandmill.rollouts.events import EvaluationPhase, Listener


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The words of the command line."""

    target: Path
    splits: tuple[str, ...]
    adapter: Path | None
    samples: int | None
    greedy: bool
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated: a manifest, an adapter on its model (None: the model as the manifest starts it), and its training steps."""

    manifest: Manifest
    adapter: Path | None
    steps: int


class EvaluationDone(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation-done", tag_field="event"):
    """The last line of `--json`."""

    run: str
    report: str
    interrupted: bool


def run(asked: Asked, *, as_json: bool) -> int:
    """Evaluates and returns the exit code. Raises SandmillError."""
    subject = subject_of(asked)
    stem = asked.target.resolve().name if asked.target.is_dir() else asked.target.stem
    folder = new_run(RUNS / f"{stem}-eval.yaml")
    title = f"sandmill eval · {subject.manifest.spec.environment.name} · {asked.adapter or asked.target} · {folder}"

    def on_request(shown: Display) -> None:
        shown.say("stopping after this split; press Ctrl-C again to stop at once")

    with listening(title, as_json=as_json, on_request=on_request) as (listener, interrupts):
        interrupted = not evaluate(subject, folder, listener, sampled=not asked.greedy)
    page = finish(folder, quiet=as_json)
    if as_json:
        sys.stdout.write(json_line(EvaluationDone(run=str(folder), report=str(page), interrupted=interrupted)) + "\n")
    return interrupts.exit_code if interrupted else 0


def subject_of(asked: Asked) -> Subject:
    """Resolves the words to what is evaluated. Raises ConfigError and RunError."""
    if asked.adapter is not None and not (asked.adapter / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{asked.adapter} holds no adapter_model.safetensors; give a folder such as runs/NAME/adapter", field="--adapter")
    if not asked.target.is_dir():
        manifest = load_manifest(asked.target, asked.overrides)
        return Subject(manifest=_narrowed(manifest, asked), adapter=asked.adapter, steps=0)
    record = read_run(asked.target)
    if record.manifest is None:
        raise RunError(f"{asked.target / 'manifest.json'} is missing or cannot be read; evaluate from the manifest file instead")
    adapter = asked.adapter or asked.target / "adapter"
    if not (adapter / "adapter_model.safetensors").is_file():
        raise RunError(f"{asked.target} has no adapter yet: the run has not ended; resume it first")
    manifest = _narrowed(_on_its_base(override_manifest(record.manifest, asked.overrides), asked.target), asked)
    return Subject(manifest=manifest, adapter=adapter, steps=record.steps[-1].step if record.steps else 0)


def evaluate(subject: Subject, folder: Path, listener: Listener, *, sampled: bool) -> bool:
    """Evaluates every split into a new run folder; False when a person asked to stop before the last. Raises SandmillError."""
    from sandmill.training.evaluate import evaluate_split
    from sandmill.training.run import open_run

    evaluation = subject.manifest.spec.evaluation
    ways = ([False] if sampled else []) + ([True] if evaluation.greedy else [])
    with open_run(subject.manifest, folder, resume=False, listener=listener) as run:
        if subject.adapter is not None:
            run.parts.policy.load_adapter(subject.adapter)
            run.parts.engine.publish(run.learner.version)
        run.step = subject.steps
        for split in evaluation.splits:
            for greedy in ways:
                if listener.should_stop():
                    return False
                evaluate_split(run, split, EvaluationPhase.ALONE, greedy=greedy)
    return True


def _narrowed(manifest: Manifest, asked: Asked) -> Manifest:
    """With the splits, attempts and ways of sampling that the command line asks for."""
    evaluation = manifest.spec.evaluation
    evaluation = msgspec.structs.replace(
        evaluation,
        splits=asked.splits or evaluation.splits,
        samples_per_task=asked.samples or evaluation.samples_per_task,
        greedy=asked.greedy or evaluation.greedy,
    )
    return msgspec.structs.replace(manifest, spec=msgspec.structs.replace(manifest.spec, evaluation=evaluation))


def _on_its_base(manifest: Manifest, run: Path) -> Manifest:
    """The run's own warm-started model, where it kept one, and no second warm start."""
    spec = manifest.spec
    model = msgspec.structs.replace(spec.model, uri=str(run / "base")) if (run / "base").is_dir() else spec.model
    warm = msgspec.structs.replace(spec.warm_start, steps=0)
    return msgspec.structs.replace(manifest, spec=msgspec.structs.replace(spec, model=model, warm_start=warm))
