"""The run folder: one writer, whole records, whole files, and what a full disk or a kill leaves."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.config.manifest import EnvironmentSection, Manifest, ModelSection, Parameters, Spec
from sandmill.errors import CheckpointCorrupt, NonFinite, RunBusy, RunError, RunIncompatible
from sandmill.store import FORMAT, RunFolder, Stream, encode, write_atomically

SRC = str(Path(__file__).parents[1] / "src")


def manifest(**parameters):
    return Manifest(
        spec=Spec(
            model=ModelSection(uri="sandmill/tiny-shell"),
            environment=EnvironmentSection(name="shell@1.0.0"),
            parameters=Parameters(**parameters),
        )
    )


class Record(msgspec.Struct, frozen=True):
    number: int
    text: str = ""
    values: tuple[float, ...] = ()
    parts: dict[str, float] = {}


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", manifest()) as folder:
        yield folder


def child(code, *arguments, **options):
    """A child process that has `run` and everything of this file's imports at hand."""
    prelude = "import os, sys, signal\nfrom pathlib import Path\nfrom test_store import *\n"
    environment = {**os.environ, "PYTHONPATH": f"{SRC}:{Path(__file__).parent}"}
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_a_run_reads_back_as_written(run):
    records = [Record(i, f"line {i}\n\x00\x1b[2J", (0.1 * i, -1e-300)) for i in range(5)]
    for record in records:
        run.append(Stream.METRICS, record)
    reader = RunFolder.open(run.path)
    assert list(reader.rows(Stream.METRICS, Record)) == records
    assert list(reader.rows(Stream.EVALUATIONS, Record)) == []
    assert reader.manifest == manifest()
    assert (run.path / "format").read_text() == f"{FORMAT}\n"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=())), st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5))
def test_any_text_is_one_line_that_every_reader_can_read(text, values):
    line = encode(Record(1, text, tuple(values)), "metrics.jsonl")
    assert b"\n" not in line
    back = msgspec.json.decode(line, type=Record)
    assert back.values == tuple(values)
    assert back.text == text.encode("utf-8", "backslashreplace").decode()


def test_a_lone_surrogate_is_escaped_and_the_rest_of_the_record_is_intact(run):
    run.append(Stream.TRAJECTORIES, Record(3, "a\udcffb", (0.25,)))
    assert list(run.rows(Stream.TRAJECTORIES, Record)) == [Record(3, "a\\udcffb", (0.25,))]


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (Record(1, "", (0.0, math.nan)), r"metrics\.jsonl: values\[1\]"),
        (Record(1, "", (), {"a": math.inf}), r"metrics\.jsonl: parts\['a'\]"),
    ],
)
def test_a_nan_is_refused_by_name_and_never_written_as_null(run, record, place):
    with pytest.raises(NonFinite, match=place):
        run.append(Stream.METRICS, record)
    assert (run.path / "metrics.jsonl").exists() is False


@given(cut=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_torn_last_line_is_passed_over_and_cut_on_resume(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "run"
    with RunFolder.create(path, manifest()) as run:
        for number in range(3):
            run.append(Stream.METRICS, Record(number, "x" * 100_000 * (number == 1)))
    whole = (path / "metrics.jsonl").read_bytes()
    last = len(whole) - whole[:-1].rfind(b"\n") - 1
    (path / "metrics.jsonl").write_bytes(whole[: -min(cut, last)])
    assert [record.number for record in RunFolder.open(path).rows(Stream.METRICS, Record)] == [0, 1]
    with RunFolder.resume(path, manifest()) as run:
        run.append(Stream.METRICS, Record(7))
        assert [record.number for record in run.rows(Stream.METRICS, Record)] == [0, 1, 7]


def test_a_stream_that_is_one_torn_line_becomes_empty(tmp_path):
    RunFolder.create(tmp_path / "run", manifest()).close()
    (tmp_path / "run/metrics.jsonl").write_bytes(b'{"number": 1' + b" " * 200_000)
    RunFolder.resume(tmp_path / "run", manifest()).close()
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == b""


def test_a_whole_line_that_is_no_record_is_named(run):
    run.append(Stream.METRICS, Record(1))
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b"{}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl:2 is not a Record record"):
        list(run.rows(Stream.METRICS, Record))


def test_two_writers_on_one_folder_are_told_who_holds_it(run):
    for attempt in (RunFolder.create, RunFolder.resume):
        with pytest.raises(RunBusy, match=f"process {os.getpid()}"):
            attempt(run.path, manifest())
    other = child("RunFolder.resume(Path(sys.argv[1]), manifest())", run.path)
    _, errors = other.communicate(timeout=30)
    assert other.returncode != 0
    assert f"RunBusy: {run.path} is being written by process {os.getpid()}" in errors


def test_a_killed_writer_gives_its_lock_up(tmp_path):
    writer = child("run = RunFolder.create(Path(sys.argv[1]), manifest()); print('ready', flush=True); signal.pause()", tmp_path / "run")
    assert writer.stdout.readline() == "ready\n"
    with pytest.raises(RunBusy, match=f"process {writer.pid}"):
        RunFolder.resume(tmp_path / "run", manifest())
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=30)
    RunFolder.resume(tmp_path / "run", manifest()).close()


def test_create_refuses_a_used_folder(tmp_path):
    RunFolder.create(tmp_path / "run", manifest()).close()
    with pytest.raises(RunIncompatible, match="already holds a run"):
        RunFolder.create(tmp_path / "run", manifest())
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"")
    with pytest.raises(RunIncompatible, match=r"cat\.jpg"):
        RunFolder.create(tmp_path / "photos", manifest())


def test_create_takes_over_a_creation_that_was_cut_short(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/manifest.json").write_text("{")
    RunFolder.create(tmp_path / "run", manifest()).close()
    assert RunFolder.open(tmp_path / "run").manifest == manifest()


def test_another_version_is_named_beside_ours(tmp_path):
    RunFolder.create(tmp_path / "run", manifest()).close()
    (tmp_path / "run/format").write_text("sandmill-run 7\n")
    for attempt in (lambda path: RunFolder.open(path), lambda path: RunFolder.resume(path, manifest())):
        with pytest.raises(RunIncompatible, match=r"'sandmill-run 7'.*'sandmill-run 1'"):
            attempt(tmp_path / "run")


def test_another_manifest_is_refused_with_the_keys_that_differ(tmp_path):
    RunFolder.create(tmp_path / "run", manifest(learning_rate=1e-3)).close()
    with pytest.raises(RunIncompatible, match=r"spec\.parameters\.steps \(40 in the run, 50 now\)") as caught:
        RunFolder.resume(tmp_path / "run", manifest(learning_rate=2e-3, steps=50))
    assert "spec.parameters.learningRate (0.001 in the run, 0.002 now)" in str(caught.value)
    assert "batchSize" not in str(caught.value)


def test_no_run_folder_and_a_truncated_manifest_are_named(tmp_path):
    with pytest.raises(RunIncompatible, match="is not a run folder"):
        RunFolder.open(tmp_path / "absent")
    RunFolder.create(tmp_path / "run", manifest()).close()
    (tmp_path / "run/manifest.json").write_text('{"spec": {')
    with pytest.raises(RunIncompatible, match=r"manifest\.json cannot be read"):
        RunFolder.resume(tmp_path / "run", manifest())


def test_truncating_takes_streams_back_and_leaves_the_ledger(run):
    for stream in Stream:
        run.append(stream, Record(1))
    offsets = run.offsets()
    for stream in Stream:
        run.append(stream, Record(2))
    run.truncate(offsets)
    kept = {stream: [record.number for record in run.rows(stream, Record)] for stream in Stream}
    assert kept.pop(Stream.LEDGER) == [1, 2]
    assert set(map(tuple, kept.values())) == {(1,)}
    with pytest.raises(CheckpointCorrupt, match=r"metrics\.jsonl holds \d+ bytes, but the checkpoint was made when it held 9999"):
        run.truncate({**offsets, "metrics.jsonl": 9999})


def test_a_reader_cannot_write(run):
    reader = RunFolder.open(run.path)
    with pytest.raises(RunError, match="reading only"):
        reader.append(Stream.METRICS, Record(1))
    with pytest.raises(RunError, match="reading only"):
        reader.write("summary.json", b"{}")


def can_mount(tmp: Path) -> bool:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp], capture_output=True, check=False)
    if done.returncode == 0:
        subprocess.run(["umount", tmp], check=True)
    return done.returncode == 0


@pytest.fixture
def full_disk(tmp_path):
    """(folder on a 64 KiB file system, options that make a child see it full): a real tmpfs where one may be mounted, else a limit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        yield disk, "resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768))"
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    try:
        yield disk, ""
    finally:
        subprocess.run(["umount", disk], check=True)


FILL = """
import resource
from sandmill.errors import DiskFull
LIMIT
run = RunFolder.create(Path(sys.argv[1]) / "run", manifest())
run.write("summary.json", b'{"old": 1}')
written = 0
try:
    for number in range(10_000):
        run.append(Stream.TRAJECTORIES, Record(number, "x" * 700))
        written += 1
except DiskFull as error:
    print(written, error.errno, error, flush=True)
try:
    run.write("summary.json", b"y" * 50_000)
except DiskFull as error:
    print(error, flush=True)
"""


def test_a_full_disk_is_named_and_loses_nothing(full_disk):
    disk, limit = full_disk
    filler = child(FILL.replace("LIMIT", limit), disk)
    output, errors = filler.communicate(timeout=60)
    assert filler.returncode == 0, errors
    first, second = output.splitlines()
    written, number, sentence = first.split(maxsplit=2)
    assert int(number) in (errno.ENOSPC, errno.EFBIG)
    assert sentence.startswith(f"no space left to write {disk / 'run/trajectories.jsonl'} (")
    assert "every record before this one is intact; free some space and go on with --resume" in sentence
    assert f"no space left to write {disk / 'run/summary.json'}" in second
    assert "its former content is intact" in second
    assert (disk / "run/summary.json").read_bytes() == b'{"old": 1}'
    assert (disk / "run/trajectories.jsonl").read_bytes().endswith(b"\n")
    assert [record.number for record in RunFolder.open(disk / "run").rows(Stream.TRAJECTORIES, Record)] == list(range(int(written)))
    assert not list((disk / "run").glob(".*"))


def test_an_atomic_write_replaces_or_leaves(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, b"one")
    write_atomically(target, b"two")
    assert target.read_bytes() == b"two"
    target.unlink()
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(target, b"three")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "absent/file", b"")
