"""The process of one training job. In: a folder with its manifest. Out: the run; every event on stdout, a line each, and in events.jsonl.

    python -m sandmill.server.trainer FOLDER PARENT ATTEMPT

It dies with its parent, whatever ends that. SIGTERM: it stops after the step in hand, saved. SIGINT: it stops at once.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from sandmill.config.load import load_manifest
from sandmill.errors import SandmillError
from sandmill.rollouts.events import (
    EpisodeFinished,
    EvaluationPhase,
    Event,
    InFlight,
    RunStage,
    RunSummary,
    StageAdvanced,
    StageChanged,
    StepFinished,
)

MANIFEST: Final = "manifest.json"
RUN: Final = "run"
EVENTS: Final = "events.jsonl"
OUTPUTS: Final = "outputs"
_PR_SET_PDEATHSIG: Final = 1
_KINDER: Final = 5
"""The server's own threads come first."""


class TaskEvent(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One item of `taskevents`. What does not exist is not there. A step that was repeated is in every attempt that made it."""

    id: int
    attempt: int
    event_type: str
    time: str
    step: int | None = None
    reward: float | None = None
    loss: float | None = None
    kl: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    graded: int | None = None
    passed: int | None = None
    errors: int | None = None
    phase: str | None = None
    task_id: str | None = None
    group: str | None = None
    index: int | None = None
    outcome: str | None = None
    turns: int | None = None
    message: str | None = None


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag="run-ended", tag_field="event"):
    """The last line of one that went well."""

    summary: RunSummary


class RunFailed(msgspec.Struct, frozen=True, kw_only=True, tag="run-failed", tag_field="event"):
    """The last line of one that did not."""

    reason: str
    message: str


class Telling:
    """A listener that writes everything down. Called from several threads."""

    def __init__(self, folder: Path, attempt: int, *, training: bool) -> None:
        self._file = os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._attempt = attempt
        self._before = "Baseline" if training else "Evaluation"
        self._number = 0
        self._stage = RunStage.LOADING
        self._lock = threading.Lock()
        self.stopping = False

    def on_event(self, event: Event) -> None:
        """See `Listener`."""
        with self._lock:
            if isinstance(event, StageChanged):
                self._stage = event.stage
            if isinstance(event, StepFinished | EpisodeFinished):
                self._number += 1
                known = {"id": self._number, "attempt": self._attempt, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                item = _of_step(event, known) if isinstance(event, StepFinished) else _of_episode(event, known, self._before)
                os.write(self._file, msgspec.json.encode(item) + b"\n")
            if not isinstance(event, EpisodeFinished | InFlight | StageAdvanced):
                say(event)
        if self.stopping and self._stage is RunStage.WARM_START and isinstance(event, StageAdvanced):
            raise KeyboardInterrupt  # a warm start has nothing to save, and a resumed run repeats it

    def should_stop(self) -> bool:
        """See `Listener`."""
        return self.stopping


def _of_step(step: StepFinished, known: dict[str, Any]) -> TaskEvent:
    return TaskEvent(
        **known,
        event_type="Metrics",
        step=step.step,
        reward=step.reward,
        loss=step.loss,
        kl=step.kl_sampler,
        entropy=step.entropy,
        grad_norm=step.grad_norm,
        learning_rate=step.learning_rate,
        tokens_per_second=step.tokens_per_s,
        graded=step.graded,
        passed=step.passed,
        errors=step.failures,
    )


def _of_episode(episode: EpisodeFinished, known: dict[str, Any], before: str) -> TaskEvent:
    when = episode.group.partition("-")[0]
    phases: dict[str, str] = {EvaluationPhase.BEFORE: before, EvaluationPhase.DURING: "Evaluation", EvaluationPhase.AFTER: "Evaluation"}
    return TaskEvent(
        **known,
        event_type="Task",
        phase=phases.get(when, "Training"),
        task_id=episode.task_id,
        group=episode.group,
        index=episode.index,
        outcome="Error" if episode.passed is None else "Passed" if episode.passed else "Failed",
        reward=episode.reward,
        turns=episode.turns,
        message=episode.failure,
    )


def say(record: msgspec.Struct) -> None:
    """One line to the server."""
    os.write(1, msgspec.json.encode(record) + b"\n")


def main() -> int:
    """Returns the exit code."""
    folder, parent, attempt = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    os.nice(_KINDER)
    try:
        say(RunEnded(summary=_train(folder, attempt)))
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        say(RunFailed(reason="TrainerMissing", message=f"the server's machine cannot train ({error}); install sandmill[train] there"))
    except SandmillError as error:
        say(RunFailed(reason=type(error).__name__, message=str(error).encode("utf-8", "backslashreplace").decode()))
    else:
        return 0
    return 1


def _train(folder: Path, attempt: int) -> RunSummary:
    manifest = load_manifest(folder / MANIFEST)
    telling = Telling(folder, attempt, training=manifest.spec.parameters.steps > 0)

    def stop(number: int, frame: object) -> None:
        telling.stopping = True

    signal.signal(signal.SIGTERM, stop)
    from sandmill.reports.html import write_report
    from sandmill.reports.metrics import read_run
    from sandmill.training.synchronous import train

    run = folder / RUN
    summary = train(manifest, run, resume=(run / "format").exists(), listener=telling)
    outputs = folder / OUTPUTS
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir()
    shutil.copytree(run / "adapter", outputs / "adapter")
    shutil.copyfile(write_report(read_run(run)), outputs / "report.html")
    return summary


if __name__ == "__main__":
    sys.exit(main())
