"""What an installation tells: lines in a log, one live line with its seconds on a terminal, and nothing with --json."""

import os
import pty
import subprocess
import sys
import threading

PROGRAM = """
import time
from sandmill.cli.installing import telling

with telling(silent=False) as (stage, progress):
    stage("fetching \\x1b]0;evil\\x07sympy")
    time.sleep(1.2)
    progress("fetching, half of it")
    time.sleep(0.5)
print("done")
"""


def test_a_log_has_a_line_for_each_stage():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("done\n", 0)
    (line,) = done.stderr.splitlines()
    assert line.startswith("fetching ")
    assert line.isprintable()


def test_a_terminal_has_one_line_with_the_seconds_of_its_stage_and_keeps_none_of_it():
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        deadline = threading.Timer(60, process.kill)
        deadline.start()
        said = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            said += piece
        assert process.wait(60) == 0
    deadline.cancel()
    os.close(ours)
    assert b"fetching, half of it" in said
    assert b"0:00:01" in said
    assert b"\x1b]0;evil" not in said
    assert said.rstrip().endswith(b"done")


def test_silence_is_silent(capfd):
    from sandmill.cli.installing import telling

    with telling(silent=True) as (stage, progress):
        stage("x")
        progress("y")
    assert capfd.readouterr() == ("", "")
