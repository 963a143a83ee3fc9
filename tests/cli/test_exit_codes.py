"""Every exception has one code and one sentence."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from sandmill import errors
from sandmill.cli.failures import exit_code_of, report_failure, sentence_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.UnknownEnvironment("x"), 3),
        (errors.GraderFailed("x"), 3),
        (errors.ModelNotFound("x"), 3),
        (errors.EngineDied("x"), 3),
        (errors.IsolationUnavailable("x"), 4),
        (errors.SandboxGone("a", "b"), 4),
        (errors.NonFinite("loss"), 5),
        (errors.NothingToLearn("x"), 5),
        (errors.RunBusy("x"), 6),
        (errors.CheckpointCorrupt("x"), 6),
        (errors.DiskFull("x"), 6),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
        (RuntimeError("x"), 1),
        (OSError(errno.EIO, "x"), 1),
    ],
)
def test_codes(error, code):
    assert exit_code_of(error) == code


def every_error(kind=errors.SandmillError):
    for child in kind.__subclasses__():
        yield child
        yield from every_error(child)


def test_every_error_of_the_tree_but_its_root_has_a_code_of_its_own_boundary():
    assert {exit_code_of(kind.__new__(kind)) for kind in every_error()} == {2, 3, 4, 5, 6, 7}


def raised(error):
    """The error with a traceback, as a handler gets it."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_what_was_not_foreseen_says_how_to_see_more(capsys):
    code = report_failure(raised(RuntimeError("boom\x1b[2J\nsecond line")), debug=False, as_json=False)
    assert code == 1
    said = capsys.readouterr().err
    assert said == "error: unexpected RuntimeError: boom␛[2J␊second line; run again with --debug to see where\n"


def test_debug_shows_where_but_never_raw_control_codes(capsys):
    report_failure(raised(RuntimeError("boom\x1b[2J")), debug=True, as_json=False)
    said = capsys.readouterr().err
    assert Path(__file__).name in said
    assert "\x1b" not in said


def test_a_full_disk_names_the_place_and_the_way_out():
    assert "no space left" in sentence_of(OSError(errno.ENOSPC, "No space left on device", "/data/run"))
    assert "/data/run" in sentence_of(OSError(errno.ENOSPC, "No space left on device", "/data/run"))
    assert "maxInFlight" in sentence_of(MemoryError())


def test_json_mode_also_tells_the_reader_of_stdout(capsys):
    report_failure(errors.NonFinite("loss"), debug=False, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told == {"event": "failed", "exit_code": 5, "error": "NonFinite", "sentence": str(errors.NonFinite("loss"))}


def test_a_place_that_may_not_be_written_is_named_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("SANDMILL_STATE", str(tmp_path / "state"))
    said = sentence_of(PermissionError(errno.EACCES, "x", str(tmp_path / "state/images")))
    assert said == f"{tmp_path}/state/images cannot be used: Permission denied; set SANDMILL_STATE to a folder that you may write to"
    said = sentence_of(OSError(errno.EROFS, "x", "runs"))
    assert said == "runs cannot be used: Read-only file system; run where you may write, or name another place"
    assert str(tmp_path / "state") in sentence_of(OSError(errno.ENOSPC, "x"))
