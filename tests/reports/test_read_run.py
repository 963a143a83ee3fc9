"""Reading a run folder: finished, unfinished, torn, foreign, of another version; and the figures that follow from it."""

from __future__ import annotations

import msgspec
import pytest
from synthetic_run import SyntheticRun

from sandmill.errors import RunError, RunIncompatible
from sandmill.reports.breakdown import shares, step_seconds, total_seconds
from sandmill.reports.html import write_report
from sandmill.reports.metrics import comparisons, read_episodes, read_run
from sandmill.reports.table import print_summary, summarise
from sandmill.rollouts.events import StepFinished


def test_a_finished_run_reads_whole(finished_run):
    record = read_run(finished_run)
    assert record.finished
    assert [step.step for step in record.steps] == list(range(1, 41))
    assert record.unreadable_rows == 0
    assert len(record.evaluations) == 8
    kinds = [(pair.split, pair.greedy) for pair in comparisons(record)]
    assert kinds == [("heldout", False), ("heldout", True), ("unseen", False), ("unseen", True)]
    assert sum(1 for _ in read_episodes(finished_run)) == 40 * 32 + 8 * 40


def test_an_unfinished_run_has_no_after_and_an_unknown_cost(unfinished_run):
    record = read_run(unfinished_run)
    assert not record.finished
    assert record.cost_microusd is None
    assert all(pair.after is None for pair in comparisons(record))
    summary = summarise(record, report=unfinished_run / "report.html")
    assert summary.cost_microusd is None
    assert summary.splits[0].after is None
    assert summary.splits[0].change is None
    assert (summary.steps_done, summary.steps_planned) == (7, 40)


def test_an_evaluation_alone_reads_as_one_pass_rate(unfinished_run, capsys):
    rows = unfinished_run / "evaluations.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b'"phase":"before"', b'"phase":"alone"'))
    print_summary(read_run(unfinished_run), report=unfinished_run / "report.html")
    said = capsys.readouterr().out
    assert "pass rate" in said.splitlines()[1]
    assert "before" not in said


def test_torn_and_broken_rows_are_left_out_and_counted(unfinished_run):
    metrics = unfinished_run / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(b"not json\n\n[1]\n" + b"[" * 5000 + b"\n\xff\xfe\n" + whole + whole[:100])
    record = read_run(unfinished_run)
    assert len(record.steps) == 7
    assert record.unreadable_rows == 4, "the torn last line is no error, the four broken rows are counted"


def test_a_repeated_step_counts_once_and_the_later_row_wins(unfinished_run):
    metrics = unfinished_run / "metrics.jsonl"
    last = msgspec.json.decode(metrics.read_bytes().splitlines()[-1], type=StepFinished)
    again = msgspec.structs.replace(last, reward=0.77)
    with metrics.open("ab") as stream:
        stream.write(msgspec.json.encode(again) + b"\n")
    record = read_run(unfinished_run)
    assert len(record.steps) == 7
    assert record.steps[-1].reward == 0.77


def test_a_row_of_another_version_is_not_mixed_in(unfinished_run):
    metrics = unfinished_run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b'"schema_version":1', b'"schema_version":9', 1))
    assert (len(read_run(unfinished_run).steps), read_run(unfinished_run).unreadable_rows) == (6, 1)


def test_a_folder_that_is_no_run_or_of_another_version_is_refused(tmp_path, unfinished_run):
    with pytest.raises(RunError, match="not a run folder"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="is not a folder"):
        read_run(tmp_path / "nothing")
    (unfinished_run / "format").write_text("sandmill-run 99\n")
    with pytest.raises(RunIncompatible, match="sandmill-run 99"):
        read_run(unfinished_run)


def test_a_run_without_a_step_or_a_manifest_still_has_a_report(tmp_path):
    folder = SyntheticRun(tmp_path / "none", steps=0, finished=False).write()
    (folder / "manifest.json").write_text("{")
    record = read_run(folder)
    assert record.manifest is None
    assert write_report(record).read_text().startswith("<!doctype html>")


def test_the_parts_of_a_step_add_up_to_its_wall_clock_time(finished_run):
    record = read_run(finished_run)
    for step in record.steps:
        assert sum(step_seconds(step).values()) == pytest.approx(step.wall_s, rel=1e-9)
    assert sum(shares(total_seconds(record.steps)).values()) == pytest.approx(1.0)
    assert shares(total_seconds([])) == {}


def test_the_summary_says_the_figures_of_the_folder(finished_run, capsys):
    record = read_run(finished_run)
    print_summary(record, report=finished_run / "report.html")
    said = capsys.readouterr().out
    heldout = next(line for line in said.splitlines() if line.startswith("heldout  sampled"))
    rates = [task.passed / task.graded for task in comparisons(record)[0].before.tasks if task.graded]
    assert f"{100 * sum(rates) / len(rates):.1f} %" in heldout
    assert "in no rate" in said
    assert "\x1b" not in said
    assert "956 MB" in said
