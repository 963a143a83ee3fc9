"""`sandmill sandbox shell`: our terminal in; an interactive shell in a fresh sandbox out; our terminal restored however it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType

from sandmill.cli.box import Wanted, exit_code, tell_refused
from sandmill.errors import ConfigError
from sandmill.sandboxes import PIPE, Process

SHELL = ("bash", "--norc", "-i")


def shell(wanted: Wanted, *, save: str | None = None) -> int:
    """Runs the shell and returns its exit code; its files are kept as the image `save`.

    Raises ConfigError when standard input or output is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("a shell needs a terminal on standard input and output; for one command use: sandmill sandbox run -- CMD")
    terminal = sys.stdin.fileno()
    with wanted.create() as sandbox:
        size = os.get_terminal_size(terminal)
        env = {"TERM": os.environ.get("TERM", "xterm"), "PS1": r"[sandbox] \w \$ "}
        process = sandbox.exec(*SHELL, env=env, user=wanted.user, tty=True, text=False, stdin=PIPE)
        process.resize(size.lines, size.columns)
        with _raw(terminal), _wakes() as (wake, waker):
            threading.Thread(target=_show, args=(process, waker), daemon=True).start()
            _type(process, terminal, wake)
        process.wait()
        if save is not None:
            sandbox.snapshot_filesystem(save)
        tell_refused(sandbox)
    return exit_code(process, None)


def _show(process: Process, waker: int) -> None:
    """Copies the shell's output to the terminal; its end wakes the typing side."""
    with contextlib.suppress(OSError):
        for piece in process.stdout:
            data = memoryview(piece if isinstance(piece, bytes) else piece.encode())
            while data:
                data = data[os.write(sys.stdout.fileno(), data) :]
    with contextlib.suppress(OSError):
        os.write(waker, b"e")


def _type(process: Process, terminal: int, wake: int) -> None:
    """Copies keys until the shell ends or the terminal does; a changed window size is passed on."""
    while True:
        ready, _, _ = select.select([terminal, wake], [], [])
        if wake in ready:
            if b"e" in os.read(wake, 64):
                return
            size = os.get_terminal_size(terminal)
            process.resize(size.lines, size.columns)
        if terminal in ready:
            keys = os.read(terminal, 4096)
            if not keys:
                process.kill()
                return
            with contextlib.suppress(BrokenPipeError, OSError):
                process.stdin.write(keys)


@contextlib.contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Raw mode inside the block; the old mode after it, also when SIGTERM or SIGHUP ends it."""
    before = termios.tcgetattr(terminal)

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setraw(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _wakes() -> Iterator[tuple[int, int]]:
    """A pipe that becomes readable when the window's size changes (`w`) or the shell has ended (`e`)."""
    wake, waker = os.pipe()
    before = signal.signal(signal.SIGWINCH, lambda number, frame: os.write(waker, b"w") and None)
    try:
        yield wake, waker
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(waker)
        os.close(wake)
