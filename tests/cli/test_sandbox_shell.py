"""`sandmill sandbox shell` at the backends whose sandboxes are guests; at this machine's own, see test_sandbox_command.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from shell_terminal import Terminal

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
    terminal.shows_its_sizes(b"echo as $(id -un)", b"as user")
    terminal.type(b"sh -c 'echo be\"\"gins; exec sleep 300'\r")
    terminal.until(b"begins")
    terminal.type(b"\x03")
    terminal.until(b"[sandbox]")
    terminal.is_given_back()
