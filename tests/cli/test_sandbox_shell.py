"""`sandmill sandbox shell` at the backends whose sandboxes are guests; at this machine's own, see test_sandbox_command.py."""

from __future__ import annotations

import os
import signal
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from shell_terminal import DEADLINE_S, Terminal

sys.path.insert(0, str(Path(__file__).parents[1] / "sandboxes" / "backends"))
from places import GUESTS, place


@pytest.fixture(params=GUESTS)
def terminal(request, sandmill, tmp_path):
    with place(request.param, tmp_path) as here:
        sandmill.env.update({name: value for name, value in os.environ.items() if name not in sandmill.env})
        opened = Terminal(sandmill, "sandbox", "shell", "--backend", request.param, "--memory", "256Mi", "--disk", "32Mi")
        yield opened
        opened.close()
        assert here.left() == []


def test_a_shell_on_a_guest(terminal):
    terminal.until(b"[sandbox]")
    terminal.type(b"stty size; echo as $(id -un)\r")
    assert b"33 101" in terminal.until(b"as user")
    ioctl(terminal.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
    os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.type(b"sleep 0.3; stty size\r")
    terminal.until(b"20 60")
    terminal.type(b"sh -c 'echo be\"\"gins; exec sleep 300'\r")
    terminal.until(b"begins")
    terminal.type(b"\x03")
    terminal.until(b"[sandbox]")
    terminal.type(b"exit 5\r")
    assert terminal.process.wait(DEADLINE_S) == 5
    assert termios.tcgetattr(terminal.theirs) == terminal.before
