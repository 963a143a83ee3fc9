"""`sandmill train FILE.yaml`: a manifest in; a run folder with checkpoints, metrics and a report out."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sandmill.cli.interrupts import NotBegun
from sandmill.cli.preview import notes, show_preview
from sandmill.cli.progress import Display, json_line, listening
from sandmill.config.allowed import allowed
from sandmill.config.load import load_manifest, with_place
from sandmill.errors import ConfigError
from sandmill.reports.inert import inert
from sandmill.rollouts.events import RunSummary, Warned

RUNS = Path("runs")
STOPPED_EARLY = 5
"""The run ended before its last step and nobody asked it to, as a cost cap does."""


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag="run-finished", tag_field="event"):
    """The last line of `--json`."""

    run: str
    report: str
    summary: RunSummary


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The words of the command line. `folder` None: a new one, or with `resume` the newest of this manifest."""

    file: Path
    resume: bool
    folder: Path | None
    overrides: tuple[str, ...]


def preview(asked: Asked, *, as_json: bool) -> int:
    """Prints what the run would be and returns the exit code. Raises ConfigError."""
    return show_preview(load_manifest(asked.file, asked.overrides), as_json=as_json)


def run(asked: Asked, *, as_json: bool) -> int:
    """Trains and returns the exit code. Raises SandmillError."""
    manifest = load_manifest(asked.file, asked.overrides)
    target = asked.folder or (latest_run(asked.file) if asked.resume else new_run(asked.file))
    if not as_json:
        sys.stderr.write("".join(inert(f"graders may {what}") + "\n" for what in allowed(manifest.spec)))
    title = f"sandmill · {manifest.spec.environment.name} · {manifest.spec.model.uri} · {target}"
    go_on = resume_command(asked.file, target, asked.overrides)

    def on_request(shown: Display) -> None:
        shown.say("stopping after this step; press Ctrl-C again to stop at once")

    with listening(title, as_json=as_json, on_request=on_request) as (listener, interrupts):
        from sandmill.training.synchronous import train

        for note in notes(manifest):
            listener.on_event(Warned(sentence=note))
        try:
            summary = train(manifest, target, resume=asked.resume, listener=listener)
        except NotBegun:
            summary = None
        except ConfigError as error:
            raise with_place(error, asked.file, asked.overrides) from error
    if summary is None:
        sys.stderr.write(inert(f"stopped before the first step; a resumed run begins again; go on with: {go_on}") + "\n")
        return interrupts.exit_code
    page = finish(target, quiet=as_json)
    if as_json:
        sys.stdout.write(json_line(RunFinished(run=str(target), report=str(page), summary=summary)) + "\n")
    if not summary.interrupted:
        return 0
    why = "everything is saved" if interrupts.requested else "see the warnings"
    said = f"stopped after step {summary.steps_done} of {summary.steps}, {why}; go on with: {go_on}"
    sys.stderr.write(inert(said) + "\n")
    return interrupts.exit_code if interrupts.requested else STOPPED_EARLY


def finish(folder: Path, *, quiet: bool) -> Path:
    """Writes the report of a run that has just ended, prints the summary unless `quiet`, and returns the page's path."""
    from sandmill.reports.html import write_report
    from sandmill.reports.metrics import read_run
    from sandmill.reports.table import print_summary

    record = read_run(folder)
    page = write_report(record)
    if not quiet:
        print_summary(record, report=page)
    return page


def new_run(file: Path) -> Path:
    """A folder name nobody has yet: runs/<manifest>-<date>-<time>."""
    stem, stamp = run_stem(file), time.strftime("%Y%m%d-%H%M%S")
    return next(path for n in range(1, 1000) if not (path := RUNS / f"{stem}-{stamp}{f'-{n}' if n > 1 else ''}").exists())


def latest_run(file: Path) -> Path:
    """The newest run of this manifest under runs/. Raises ConfigError when there is none."""
    found = sorted(path for path in RUNS.glob(f"{run_stem(file)}-[0-9]*") if (path / "manifest.json").is_file())
    if not found:
        raise ConfigError(f"there is no run of {file.name} under {RUNS}/ to resume; name one with --run DIR")
    return found[-1]


def run_stem(file: Path) -> str:
    """The manifest's name, reduced to characters that are plain in every shell and file system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-.")[:60] or "run"


def resume_command(file: Path, folder: Path, overrides: Sequence[str]) -> str:
    """What a person types to go on."""
    words = ["sandmill", "train", str(file), "--resume", "--run", str(folder)]
    return shlex.join([*words, *(word for override in overrides for word in ("--set", override))])
