"""Events of a run in; a live display, plain lines or JSON lines out. Every foreign string passes `inert`.

A display that cannot write (its terminal or pipe is gone) falls silent: a run is never ended by who watches it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import IO, Protocol

import msgspec

from sandmill.cli.interrupts import Interrupts, NotBegun
from sandmill.cli.view import RunView
from sandmill.reports.inert import inert
from sandmill.reports.words import duration, evaluation_line, percent, step_line
from sandmill.rollouts.events import (
    CheckpointSaved,
    EvaluationFinished,
    Event,
    RunStage,
    StageAdvanced,
    StageChanged,
    StepFinished,
    Warned,
)


class Display(Protocol):
    """Shows events. `say` adds one sentence of the command itself."""

    def show(self, event: Event) -> None: ...

    def say(self, sentence: str) -> None: ...


class Relay:
    """The listener given to the loop: shows every event, and asks to stop once a person did."""

    def __init__(self, display: Display, interrupts: Interrupts) -> None:
        self._display = display
        self._interrupts = interrupts
        self._stage: RunStage | None = None

    def on_event(self, event: Event) -> None:
        """Shows it. Raises NotBegun, and nothing else: when a person asked to stop and what comes before the first step is over, or
        between two steps of a warm start."""
        with contextlib.suppress(OSError, ValueError):
            self._display.show(event)
        before = self._stage in (RunStage.LOADING, RunStage.WARM_START)
        if isinstance(event, StageChanged):
            self._stage = event.stage
        advanced = isinstance(event, StageAdvanced) and self._stage is RunStage.WARM_START
        if self._interrupts.requested and (advanced or (before and isinstance(event, StageChanged))):
            raise NotBegun

    def should_stop(self) -> bool:
        return self._interrupts.requested


class JsonLines:
    """Every event as one line of JSON on `out`, sentences on `err`."""

    def __init__(self, out: IO[str], err: IO[str]) -> None:
        self._out = out
        self._err = err
        self._reader_gone = False

    def show(self, event: Event) -> None:
        self.write(json_line(event))

    def say(self, sentence: str) -> None:
        self._err.write(f"{inert(sentence)}\n")
        self._err.flush()

    def write(self, line: str) -> None:
        """One finished line; silent once the reader has gone."""
        if self._reader_gone:
            return
        try:
            self._out.write(line + "\n")
            self._out.flush()
        except OSError:
            self._reader_gone = True


def json_line(record: msgspec.Struct) -> str:
    """One record as one line of pure ASCII JSON; NaN and infinities are null, lone surrogates are escapes."""
    return json.dumps(_finite(msgspec.to_builtins(record)), ensure_ascii=True, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value


class PlainLines:
    """One line per step, evaluation, stage and warning, for pipes and logs."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._view = RunView()

    def show(self, event: Event) -> None:
        before = self._view.done
        self._view.apply(event)
        if isinstance(event, StepFinished):
            self._line(step_line(event, self._view.seconds_left))
        elif isinstance(event, EvaluationFinished):
            self._line(evaluation_line(event))
        elif isinstance(event, Warned):
            self._line(f"warning: {event.sentence}")
        elif isinstance(event, CheckpointSaved):
            self._line(f"checkpoint after step {event.step}")
        elif isinstance(event, StageChanged) and event.stage is not RunStage.TRAINING:
            self._line(stage_words(event.stage, event.detail) + (f" ({event.total})" if event.total else ""))
        elif isinstance(event, StageAdvanced):
            self._advanced(before)

    def say(self, sentence: str) -> None:
        self._line(sentence)

    def _advanced(self, before: int) -> None:
        """A line at every tenth of a long stage, so that a log neither floods nor falls silent."""
        total = self._view.total
        if total and self._view.done * 10 // total > before * 10 // total and self._view.done < total:
            self._line(f"  {percent(self._view.done / total)}  {self._view.note}  {duration(self._view.seconds_left)} left")

    def _line(self, text: str) -> None:
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        self._out.write(inert(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._out.flush()


def stage_words(stage: RunStage, detail: str) -> str:
    """A stage in words, such as "evaluating heldout"."""
    return f"{stage.value.replace('-', ' ')} {detail}".rstrip()


@contextlib.contextmanager
def display(title: str, *, as_json: bool, out: IO[str] | None = None, err: IO[str] | None = None) -> Iterator[Display]:
    """The display that fits: JSON lines when asked, a live one on a terminal, else plain lines."""
    out, err = out or sys.stdout, err or sys.stderr
    if as_json:
        yield JsonLines(out, err)
    elif out.isatty():
        from sandmill.cli.live import live_display

        with live_display(title) as live:
            yield live
    else:
        plain = PlainLines(out)
        plain.say(title)
        yield plain


@contextlib.contextmanager
def listening(title: str, *, as_json: bool, on_request: Callable[[Display], None]) -> Iterator[tuple[Relay, Interrupts]]:
    """A display with the listener that feeds it, and the interrupts it answers to; all ended in order."""
    with display(title, as_json=as_json) as shown, Interrupts(lambda: on_request(shown)) as interrupts:
        yield Relay(shown, interrupts), interrupts
