"""Terminals behave the same at every backend: whose they are, what they are told, how keys reach the foreground, and how they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from sandmill.errors import ConfigError, ExecFailed
from sandmill.sandboxes import Process, Sandbox

DEADLINE_S = 30.0
PLAIN = bytes(byte for byte in range(256) if byte not in b"\x03\x1a\x1c")
"""gVisor takes the three others for the keys of signals in every mode."""


JOB = "import time; print('beg' 'ins'); time.sleep(1); print('re' 'sumed')"


class Screen:
    """What a command has written on its terminal."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.text = ""
        self._pieces: Iterator[object] = iter(process.stdout)

    def until(self, words: str) -> str:
        """Everything before `words`, which are taken too."""
        while words not in self.text:
            piece = next(self._pieces, None)
            assert piece is not None, self.text
            self.text += str(piece)
        before, _, self.text = self.text.partition(words)
        return before


@pytest.fixture
def on_screen(box: Sandbox) -> Iterator[Callable[..., Screen]]:
    """Commands on terminals, which end with the test, and when nothing comes for too long."""
    started: list[Process] = []

    def start(*argv: str, **options: object) -> Screen:
        started.append(box.exec(*argv, tty=True, timeout=DEADLINE_S, **options))  # type: ignore[arg-type]
        return Screen(started[-1])

    yield start
    for process in started:
        process.kill()


def shell(on_screen: Callable[..., Screen]) -> Screen:
    """An interactive one, at its first prompt."""
    screen = on_screen("bash", "--norc", "--noediting", "-i", env={"PS1": "at[$?]: ", "TERM": "dumb"})
    screen.until("at[0]: ")
    return screen


def gone(box: Sandbox, marker: str) -> bool:
    """Whether no process has this argument, after a while."""
    deadline = time.monotonic() + DEADLINE_S
    while box.run("sh", "-c", 'grep -lz "^$1$" /proc/[0-9]*/cmdline 2>/dev/null | grep -v "/$$/"', "sh", marker).stdout:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_terminal_is_a_terminal_of_its_users_own(box: Sandbox, on_screen: Callable[..., Screen]) -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && tty; stat -c %u $(tty); echo err >&2; echo in < $(tty)"
    for user, number in (("user", 1000), ("root", 0)):
        process = on_screen("sh", "-c", script, user=user).process
        assert process.wait() == 0
        lines = str(process.stdout.read()).split("\r\n")
        assert lines[0].startswith("/dev/pts/")
        assert lines[1:] == [str(number), "err", "in", ""]
        assert process.stderr.read() == ""


def test_keys_arrive_and_are_echoed(on_screen: Callable[..., Screen]) -> None:
    screen = on_screen("sh", "-c", "read line; echo got $line")
    screen.process.stdin.write("a line\n")
    assert screen.until("got a line\r\n") == "a line\r\n"
    assert screen.process.wait() == 0


def test_the_end_of_input_is_a_key(on_screen: Callable[..., Screen]) -> None:
    process = on_screen("cat").process
    process.stdin.write("x\n\x04")
    assert (process.wait(), process.stdout.read()) == (0, "x\r\nx\r\n")


def test_its_size_is_what_it_was_told(on_screen: Callable[..., Screen]) -> None:
    screen = shell(on_screen)
    screen.process.resize(31, 99)
    screen.process.stdin.write("stty size\n")
    screen.until("31 99\r\n")
    with pytest.raises(ConfigError, match="columns"):
        screen.process.resize(31, 65536)


def test_whoever_is_in_the_foreground_learns_of_a_new_size(on_screen: Callable[..., Screen]) -> None:
    screen = shell(on_screen)
    said = "signal.signal(28, lambda *_: print('now', os.get_terminal_size()))"
    watcher = f"import os, signal, time; {said}; print('watch' 'es'); [time.sleep(0.05) for _ in range(600)]"
    screen.process.stdin.write(f'python3 -uc "{watcher}"\n')
    screen.until("watches")
    screen.process.resize(20, 60)
    screen.until("now os.terminal_size(columns=60, lines=20)")


def test_a_key_interrupts_the_foreground_and_not_the_shell(box: Sandbox, on_screen: Callable[..., Screen]) -> None:
    screen = shell(on_screen)
    screen.process.stdin.write("sh -c 'echo be\"\"gins; exec sleep 4731'\n")
    screen.until("begins")
    screen.process.stdin.write("typed before\x03")
    screen.until("at[130]: ")
    assert gone(box, "4731")
    screen.process.stdin.write("exit 5\n")
    assert screen.process.wait() == 5


def test_a_key_stops_the_foreground_and_a_word_resumes_it(on_screen: Callable[..., Screen]) -> None:
    screen = shell(on_screen)
    screen.process.stdin.write(f'python3 -uc "{JOB}"\n')  # a shell's own child could be stopped half-way into existence, and hold it up
    screen.until("begins")
    screen.process.stdin.write("\x1a")
    screen.until("at[148]: ")
    screen.process.stdin.write("fg\n")
    screen.until("resumed")
    screen.until("at[0]: ")


def test_bytes_pass_unchanged_when_it_is_raw(on_screen: Callable[..., Screen]) -> None:
    data = PLAIN * 400
    process = on_screen("sh", "-c", f"stty raw -echo; echo ready; exec head -c {len(data)}", text=False).process
    said = b""
    pieces = iter(process.stdout)
    while b"ready\n" not in said:
        said += bytes(next(pieces))  # type: ignore[arg-type]
    process.stdin.write(data)
    while len(said) < len(data) + len(b"ready\n"):
        said += bytes(next(pieces))  # type: ignore[arg-type]
    assert said.partition(b"ready\n")[2] == data
    assert process.wait() == 0


def test_output_that_nobody_reads_is_bounded(on_screen: Callable[..., Screen]) -> None:
    process = on_screen("sh", "-c", "stty -opost; head -c 300000 /dev/zero; exit 3", max_output=1000, text=False).process
    assert process.wait() == 3
    assert process.truncated
    assert len(process.stdout.read()) == 1000


def test_a_kill_and_a_timeout_end_everything_on_it(box: Sandbox, on_screen: Callable[..., Screen]) -> None:
    screen = shell(on_screen)
    screen.process.stdin.write("(trap '' HUP INT TERM; sleep 4732) & sleep 4732\n")
    screen.until("sleep 4732\r\n")
    screen.process.kill()
    assert (screen.process.returncode, screen.process.signal) == (-9, 9)
    assert gone(box, "4732")
    expired = box.exec("sh", "-c", "echo so far; sleep 4733", tty=True, timeout=1)
    assert (expired.wait(), expired.timed_out, expired.stdout.read()) == (-9, True, "so far\r\n")
    assert gone(box, "4733")


def test_a_child_in_the_background_does_not_hold_it(on_screen: Callable[..., Screen]) -> None:
    began = time.monotonic()
    process = on_screen("sh", "-c", "sleep 4734 & echo done; exit 4").process
    assert process.wait() == 4
    assert process.stdout.read() == "done\r\n"
    assert time.monotonic() - began < DEADLINE_S / 2


def test_after_its_end_nothing_is_typed_or_resized(on_screen: Callable[..., Screen]) -> None:
    process = on_screen("true").process
    assert process.wait() == 0
    process.resize(10, 10)
    with pytest.raises(BrokenPipeError):
        process.stdin.write("x" * 1_000_000)


def test_a_command_that_cannot_start_has_no_terminal(box: Sandbox) -> None:
    with pytest.raises(ExecFailed):
        box.exec("no-such-program", tty=True)


def test_terminals_do_not_run_out(box: Sandbox) -> None:
    for _ in range(12):
        assert box.exec("true", tty=True).wait() == 0
    many = [box.exec("sh", "-c", "read line; exit $line", tty=True) for _ in range(12)]
    for number, process in enumerate(many):
        process.stdin.write(f"{number}\n")
    assert [process.wait(DEADLINE_S) for process in many] == list(range(12))
