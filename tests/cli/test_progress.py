"""Live, plain and JSON displays of the same events; hostile strings act in none of them."""

from __future__ import annotations

import io
import json
import os
import re

import pytest
from rich.console import Console
from synthetic_run import HOSTILE, SyntheticRun

from sandmill.cli.interrupts import Interrupts
from sandmill.cli.live import LiveDisplay
from sandmill.cli.progress import JsonLines, PlainLines, Relay
from sandmill.cli.view import RunView
from sandmill.reports.metrics import read_run
from sandmill.reports.words import dollars, duration, sparkline
from sandmill.rollouts.events import CheckpointSaved, EpisodeFinished, InFlight, RunStage, StageAdvanced, StageChanged, Warned

ACTIVE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def episode(**changes):
    """A failed episode whose every string is hostile."""
    names = {"group": HOSTILE[2], "task_id": HOSTILE[2], "failure": HOSTILE[2]}
    figures = {"index": 0, "reward": None, "passed": None, "turns": 1, "sampled_tokens": 5, "seconds": 0.1}
    return EpisodeFinished(**{**names, **figures, **changes})


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """What a run tells, hostile strings in every place that an outsider can reach."""
    record = read_run(SyntheticRun(tmp_path_factory.mktemp("runs") / "x", steps=12, finished=False, priced=False).write())
    told = [StageChanged(stage=RunStage.LOADING, detail=HOSTILE[2]), StageChanged(stage=RunStage.WARM_START, total=20)]
    told += [StageAdvanced(done=done, note=f"loss {HOSTILE[2]}") for done in range(1, 21)]
    told += [StageChanged(stage=RunStage.EVALUATING, total=4, detail=HOSTILE[2])]
    told += [episode(index=index) for index in range(4)]
    told += [*record.evaluations, StageChanged(stage=RunStage.TRAINING, total=40), InFlight(count=17)]
    for step in record.steps:
        told += [step, Warned(sentence=HOSTILE[2], step=step.step)]
    return [*told, CheckpointSaved(step=12, path=HOSTILE[2])]


def test_json_lines_are_every_event_and_nothing_else(events):
    out, err = io.StringIO(), io.StringIO()
    shown = JsonLines(out, err)
    for event in events:
        shown.show(event)
    shown.say("a sentence")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == len(events)
    assert out.getvalue().isascii()
    assert {line["event"] for line in lines} >= {"step-finished", "evaluation-finished", "stage-changed", "warned", "in-flight"}
    assert err.getvalue() == "a sentence\n"


def test_numbers_that_json_cannot_say_are_null(events):
    out = io.StringIO()
    JsonLines(out, io.StringIO()).show(episode(reward=float("nan"), seconds=float("inf")))
    assert json.loads(out.getvalue())["reward"] is None


def test_plain_lines_are_one_line_per_step_and_inert(events):
    out = io.StringIO()
    shown = PlainLines(out)
    for event in events:
        shown.show(event)
    said = out.getvalue()
    assert not ACTIVE.search(said)
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(steps) == 12
    figures = r"reward \d\.\d\d  pass \d+ % \(\d+/\d+\)  \d\.\d\d s  [\d,]+ tok/s  cost unknown"
    assert re.fullmatch(rf"step 12/40  {figures}(  failures \d+)?  left \d:\d\d", steps[-1])
    assert len([line for line in said.splitlines() if line.startswith("warning: ")]) == 12
    assert said.count("heldout sampled before: pass ") == 1


def test_plain_lines_survive_a_narrow_encoding(events):
    raw = io.BytesIO()
    shown = PlainLines(io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    for event in events:
        shown.show(event)
    assert b"warning: " in raw.getvalue()


def test_the_live_panel_says_everything_and_is_inert(events):
    console = Console(file=io.StringIO(), width=110, force_terminal=True, color_system=None, markup=False, highlight=False)
    shown = LiveDisplay(f"run {HOSTILE[2]}", console)
    for event in events:
        shown.show(event)
    console.print(shown)
    said = console.file.getvalue()
    assert not ACTIVE.search(said)
    figures = ("12/40", "left", "17 in flight", "reward", "pass rate", "tokens/s", "unknown so far", "failures", "training 2")
    assert [words for words in figures if words not in said] == []


def test_the_view_counts_what_is_left():
    view = RunView()
    view.apply(StageChanged(stage=RunStage.WARM_START, total=10))
    assert view.seconds_left is None
    view.apply(StageAdvanced(done=5))
    assert view.seconds_left == pytest.approx(view.stage_seconds, rel=0.5, abs=0.01)
    view.apply(StageChanged(stage=RunStage.SAVING))
    assert view.seconds_left is None


def test_a_reader_that_goes_away_never_ends_the_run(events):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        relay = Relay(JsonLines(pipe, io.StringIO()), Interrupts())
        for event in events:
            relay.on_event(event)
        assert not relay.should_stop()
        pipe.write("x")
        with pytest.raises(BrokenPipeError):
            pipe.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())


def test_unknown_money_and_time_read_unknown():
    assert dollars(None) == "unknown"
    assert duration(None) == "?"
    assert duration(3725) == "1:02:05"
    assert sparkline([None, 0.0, 1.0]) == " ▁█"
