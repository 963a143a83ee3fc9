"""Field cases about text that outsiders control: half emoji, control codes, markup and names, in logs, progress, reports and files."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from sandmill.cli.progress import JsonLines, PlainLines
from sandmill.cli.train import new_run, run_stem
from sandmill.config.load import parse_manifest
from sandmill.environments.task import Graded
from sandmill.models.model import StopReason
from sandmill.reports.html import write_report
from sandmill.reports.metrics import read_episodes, read_run
from sandmill.rollouts.events import EpisodeFinished, EpisodeRecord, Warned
from sandmill.rollouts.trajectory import Episode, Trajectory, Turn
from sandmill.store import RunFolder, Stream

HALF_EMOJI = "\ud835"
MANIFEST = b"spec: {model: {uri: sandmill/tiny-shell}, environment: {name: shell@1.0.0}}"
ACTIVE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def record(task_id: str, text: str) -> EpisodeRecord:
    turn = Turn(context_ids=(1,), token_ids=(2,), logprobs=(-0.1,), policy_versions=(0,), stop=StopReason.STOP)
    trajectory = Trajectory(turns=(turn,), commands=(), spans=(), answer=text, text=(("task", text), ("model", text), ("tool", text)))
    episode = Episode(group=task_id, index=0, task_id=task_id, trajectory=trajectory, verdict=Graded(reward=1.0, passed=True))
    return EpisodeRecord(step=1, split="train", episode=episode)


@pytest.mark.case(39)
def test_strands_env_211_half_an_emoji_is_kept_read_and_shown(tmp_path):
    with RunFolder.create(tmp_path / "run", parse_manifest(MANIFEST)) as run:
        for name in ("before", HALF_EMOJI, "after"):
            run.append(Stream.TRAJECTORIES, record(name, f"text {HALF_EMOJI} text"))
    assert len(list(read_episodes(tmp_path / "run"))) == 3, "the odd one stops none of its siblings"
    page = write_report(read_run(tmp_path / "run")).read_bytes()
    page.decode("utf-8")
    assert page.count(b'"task":"') == 3


@pytest.mark.case(39)
def test_inspect_ai_3802_half_an_emoji_in_live_output_stops_nothing():
    finished = EpisodeFinished(
        group="g", index=0, task_id=HALF_EMOJI, reward=1.0, passed=True, failure=None, turns=1, sampled_tokens=1, seconds=0.1
    )
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    JsonLines(out, io.StringIO()).show(finished)
    assert json.loads(out.buffer.getvalue())["task_id"] == HALF_EMOJI
    lines = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    PlainLines(lines).show(Warned(sentence=f"odd {HALF_EMOJI}"))
    assert "⟨U+D835⟩" in lines.buffer.getvalue().decode()


@pytest.mark.case(23)
@pytest.mark.parametrize(
    "name", ["../escaped-case", "/etc/x", "suite/row_003", "", ".", "..", "-rf", "a\0b", "\x1b[2J", "x" * 400, "漢字", HALF_EMOJI]
)
def test_benchflow_361_a_name_never_leaves_the_runs_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stem = run_stem(Path(f"{name}.yaml"))
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,60}", stem)
    assert not stem.startswith(("-", "."))
    folder = new_run(Path(f"{name}.yaml"))
    assert folder.resolve().parent == (tmp_path / "runs").resolve()
    folder.mkdir(parents=True)
    assert new_run(Path(f"{name}.yaml")) != folder, "a second run in the same second has a folder of its own"


@pytest.mark.case(23)
@pytest.mark.parametrize("task_id", ["../escaped-case", "/etc/x", "suite/row_003"])
def test_coder_eval_159_a_task_id_names_no_file(task_id, tmp_path):
    with RunFolder.create(tmp_path / "run", parse_manifest(MANIFEST)) as run:
        run.append(Stream.TRAJECTORIES, record(task_id, "text"))
    write_report(read_run(tmp_path / "run"))
    assert [path for path in tmp_path.rglob("*") if "escaped" in path.name or "row_003" in path.name] == []
    assert [one.episode.task_id for one in read_episodes(tmp_path / "run")] == [task_id], "reading gives the id back unchanged"


@pytest.mark.case(37)
def test_ms_swift_10125_environment_options_keep_their_own_keys_through_the_run_folder(tmp_path):
    data = MANIFEST.replace(b"shell@1.0.0}", b"shell@1.0.0, options: {a: [x], b: 2}}")
    manifest = parse_manifest(data)
    with RunFolder.create(tmp_path / "run", manifest):
        pass
    again = read_run(tmp_path / "run").manifest
    assert again == manifest
    assert again is not None
    assert again.spec.environment.options == {"a": ["x"], "b": 2}, "no key is added as null for the sake of another"
    assert msgspec.json.decode((tmp_path / "run" / "manifest.json").read_bytes())["spec"]["environment"]["options"] == {"a": ["x"], "b": 2}


HOSTILE = {
    "clear screen": "\x1b[2J\x1b[H",
    "window title": "\x1b]0;pwned\x07",
    "clipboard": "\x1b]52;c;cHduZWQ=\x07",
    "8-bit control": "\x9b31m\x90q\x9c",
    "nul and backspace": "\x00\x08\x08\x7f",
    "bidi": "\u202egnp.exe\u2066",
    "markup": "[red]x[/red] [link=http://x]y[/link]",
    "html": "</script><script>alert(1)</script>",
    "carriage return": "real\rfake",
    "huge": "A" * 300_000,
}


@pytest.mark.pattern(4)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_output_is_inert_in_log_progress_and_report(text, tmp_path):
    out = io.StringIO()
    PlainLines(out).show(Warned(sentence=text))
    assert out.getvalue().count("\n") == 1
    assert not ACTIVE.search(out.getvalue())
    with RunFolder.create(tmp_path / "run", parse_manifest(MANIFEST)) as run:
        run.append(Stream.TRAJECTORIES, record("task", text))
        run.append(Stream.METRICS, Warned(sentence=text))
    page = write_report(read_run(tmp_path / "run")).read_text()
    assert not ACTIVE.search(page)
    assert page.count("<script") == 2
    assert len(page) < 200_000
    assert sys.getsizeof(page) < 1_000_000
