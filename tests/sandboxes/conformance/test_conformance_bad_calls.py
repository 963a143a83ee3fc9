"""Calls that make no sense, at every backend: one sentence that names the argument, nothing started, nothing left."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sandmill.errors import ConfigError, ExecFailed
from sandmill.sandboxes import Sandbox

WRONG_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a whole list": ((["ls", "-l"],), {}, r"argv: every word of a command is text of its own, .* not \['ls', '-l'\]"),
    "a number": (("echo", 7), {}, "argv: every word .* not 7"),
    "a deadline": (("true",), {"timeout": "soon"}, "timeout: 'soon' is not a duration"),
    "a variable": (("true",), {"env": {"A": 1}}, "env: an environment variable and its value are text, not 'A' and 1"),
    "a user": (("true",), {"user": "bob"}, "user: user must be 'user' or 'root'"),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
@pytest.mark.parametrize("face", ["run", "exec"])
def test_a_wrong_argument_is_named_and_nothing_runs(box: Sandbox, face: str, call: str) -> None:
    argv, options, said = WRONG_CALLS[call]
    with pytest.raises(ConfigError, match=said):
        getattr(box, face)(*argv, **options)


@pytest.mark.parametrize("face", ["run", "exec"])
def test_a_line_given_as_one_word_is_answered_with_how_to_write_it(box: Sandbox, face: str) -> None:
    with pytest.raises(ExecFailed, match=r"the command 'echo hi' could not be started: No such file or directory; .*\"bash\", \"-c\""):
        getattr(box, face)("echo hi")


def test_refused_calls_leave_no_descriptor(box: Sandbox) -> None:
    box.run("true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        for argv, options in ((("a\0b",), {}), (("true",), {"env": {"A=": "1"}}), (("nowhere",), {})):
            with pytest.raises((ConfigError, ExecFailed)):
                box.exec(*argv, **options)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_deadlines_may_be_written_as_everywhere_else(box: Sandbox) -> None:
    assert box.run("sleep", "60", timeout="500ms").timed_out
    process = box.exec("sleep", "60", timeout="500ms")
    assert process.wait(timeout="30s") == -9
    assert process.timed_out


def test_text_is_taken_wherever_bytes_are(box: Sandbox) -> None:
    assert box.run("cat", stdin="given\n").stdout == b"given\n"
    box.write_files({"text-as-given": "ä"})
    assert box.read("text-as-given") == "ä".encode()
    with pytest.raises(ConfigError, match="files: the contents of 'x' must be bytes or text, not int"):
        box.write_files({"x": 3})  # type: ignore[dict-item]
