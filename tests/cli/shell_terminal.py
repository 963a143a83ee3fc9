"""A terminal for the real command: what a person types goes in, what they would see comes out."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from fcntl import ioctl

DEADLINE_S = 60.0


class Terminal:
    """A pseudo-terminal with the command on its other side."""

    def __init__(self, sandmill, *words) -> None:
        self.ours, theirs = pty.openpty()
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.process = sandmill.start(*words, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, start_new_session=True)
        self.theirs = theirs
        self.said = b""

    def until(self, words):
        end = time.monotonic() + DEADLINE_S
        while words not in self.said:
            assert time.monotonic() < end, self.said
            if select.select([self.ours], [], [], 0.2)[0]:
                self.said += os.read(self.ours, 65536)
        before, _, self.said = self.said.partition(words)
        return before

    def type(self, keys):
        os.write(self.ours, keys)

    def shows_its_sizes(self, command: bytes, said: bytes):
        """A shell's programs see this terminal's size, before and after it changes. `command` prints `said` besides."""
        self.until(b"[sandbox]")
        self.type(b"stty size; " + command + b"\r")
        assert b"33 101" in self.until(said)
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)
        self.type(b"sleep 0.3; stty size\r")
        self.until(b"20 60")

    def is_given_back(self):
        """The shell is left with 5, and the terminal is as it was."""
        self.type(b"exit 5\r")
        assert self.process.wait(DEADLINE_S) == 5
        assert termios.tcgetattr(self.theirs) == self.before

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)
