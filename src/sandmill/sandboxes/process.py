"""A running command. In: pipes from inside a sandbox and the agent's notices. Out: output as it comes, and how the command ended.

A command has ended when its first process has. Its output is read for 50 ms more at most: a child left in the background may hold
the pipe for ever. Output that nobody reads is kept up to `max_output` bytes per stream and dropped after that (`truncated`);
after 64 MiB dropped the command is killed. A timeout kills the command's whole tree and keeps the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import fcntl
import os
import signal as signals
import struct
import termios
from collections.abc import Callable
from typing import Final

import msgspec

from sandmill.errors import ConfigError, ExecFailed, ExecTimeout, SandboxError, SandboxGone
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.dual import dual
from sandmill.sandboxes.spec import seconds
from sandmill.sandboxes.streams import Input, Output


class Stdin(enum.Enum):
    """Where a command's standard input comes from, when it is neither closed nor given."""

    PIPE = enum.auto()


PIPE: Final = Stdin.PIPE
"""As `stdin=`: the command's standard input stays open and is written through `process.stdin`."""
_DRAIN_S: Final = 0.05
_KILL_PATIENCE_S: Final = 5.0
_LARGEST_SIZE: Final = 65535


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished command used: its first process and those it waited for."""

    user_s: float
    system_s: float
    max_rss_bytes: int
    duration_s: float


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A finished command. `exit_code` is None when a signal ended it (`signal`) or a timeout did (`timed_out`)."""

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool
    duration_s: float
    gone: str | None = None
    """Why the sandbox ended under the command, when its lifetime or dollar cap did that; the output up to then is kept."""


class Process:
    """A command started by `Sandbox.exec`. Its output is read while it runs, whether anyone asks for it or not."""

    def __init__(self, agent: Agent, stdout: int, stderr: int, stdin: int, *, text: bool, max_output: int, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._agent = agent
        self._loop = loop
        self._started = loop.create_future()
        self._exited = loop.create_future()
        self._exited.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._started.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._timeout_s = timeout_s
        self._ending: asyncio.Task[None] | None = None
        self.stdout = Output(loop, stdout, max_output, text, self._must_end)
        self.stderr = Output(loop, stderr, max_output, text, self._must_end)
        self.stdin = Input(loop, stdin)
        self.id = agent.listen(self)
        self.returncode: int | None = None
        """Exit code, or minus the signal's number; None while the command runs."""
        self.usage: Usage | None = None
        self.timed_out = False
        self.program: str | bytes = ""
        """What was started, as its caller named it."""

    def __repr__(self) -> str:
        state = "runs" if self.returncode is None else f"ended with {self.returncode}"
        return f"<Process {self.program!r:.100} {state}>"

    @property
    def signal(self) -> int | None:
        """The signal that ended the command, if one did."""
        return -self.returncode if self.returncode is not None and self.returncode < 0 else None

    @property
    def truncated(self) -> bool:
        """Some output was dropped."""
        return self.stdout.truncated or self.stderr.truncated

    @dual
    async def wait(self, timeout: float | str | None = None) -> int:
        """Waits for the end and returns `returncode`. Raises ExecTimeout after `timeout` (the command runs on), SandboxGone."""
        try:
            async with asyncio.timeout(seconds(timeout)):
                await asyncio.shield(self._exited)
        except TimeoutError:
            raise ExecTimeout(f"the command still runs after {timeout}{'' if isinstance(timeout, str) else ' s'}") from None
        assert self.returncode is not None
        return self.returncode

    @dual
    async def kill(self) -> None:
        """Kills the command and everything it started, and waits until it is dead. Idempotent."""
        await self._kill()

    @dual
    async def send_signal(self, number: int) -> None:
        """Sends a signal to the command's process group."""
        if self.returncode is None:
            self._agent.send(wire.agent_request(wire.SIGNAL, self.id, first=int(signals.Signals(number))))

    @dual
    async def resize(self, rows: int, columns: int) -> None:
        """Tells a command started with `tty=True` its terminal's size; without a terminal, nothing happens. Raises ConfigError."""
        check_size(rows, columns)
        if self.stdin._fd >= 0 and os.isatty(self.stdin._fd):
            fcntl.ioctl(self.stdin._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def feed(self, data: bytes) -> None:
        """Writes `data` to the command's standard input and closes it; a command may stop reading before."""
        with contextlib.suppress(BrokenPipeError):
            await self.stdin.write.aio(data)
        self.stdin.shut()

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Calls back, on the sandbox loop, once the command has ended or its sandbox has."""
        self._exited.add_done_callback(lambda _: callback())

    async def begin(self) -> None:
        """Waits until the command runs. Raises ExecFailed, SandboxGone."""
        await self._started
        if self._timeout_s is not None:
            deadline = self._loop.call_later(self._timeout_s, self._expire)
            self._exited.add_done_callback(lambda _: deadline.cancel())

    def reply(self, reply: wire.AgentReply, fd: int) -> bool:
        """Listener: the agent's notices."""
        if fd >= 0:
            os.close(fd)
        if reply.op == wire.STARTED and not self._started.done():
            self._started.set_result(None)
            return False
        if reply.op != wire.EXIT or self.returncode is not None:
            raise wire.MalformedError(f"an unexpected notice of kind {reply.op}")
        if reply.flags & wire.NOT_STARTED:
            self._fail(exec_failed(reply.status, self.program))
            return True
        self.returncode = os.waitstatus_to_exitcode(reply.status) if reply.status >= 0 else -signals.SIGKILL
        self.usage = usage_of(reply)
        if not self._started.done():
            self._started.set_result(None)
        self._loop.create_task(self._finish())
        return True

    def gone(self, error: SandboxGone) -> None:
        """Listener: the sandbox ended under the command; the output up to then is kept."""
        self._fail(error)

    def refuse(self, error: SandboxError | ConfigError) -> None:
        """Nothing was sent for it after all."""
        self._agent.forget(self.id)
        self._fail(error)

    def _fail(self, error: SandboxError | ConfigError) -> None:
        for future in (self._started, self._exited):
            if not future.done():
                future.set_exception(error)
        self.stdin.shut()
        self.stdout.close()
        self.stderr.close()

    async def _finish(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self.stdout.closed.wait()
                await self.stderr.closed.wait()
        self.stdin.shut()
        self.stdout.close()
        self.stderr.close()
        if not self._exited.done():
            self._exited.set_result(None)

    def _expire(self) -> None:
        self.timed_out = self._ending is None
        self._must_end()

    def _must_end(self) -> None:
        """At the deadline or in a flood, whichever comes first. Plain callbacks: a task that watched would delay the first output."""
        if self._ending is None and not self._exited.done():
            self._ending = self._loop.create_task(self._end_quietly())

    async def _end_quietly(self) -> None:
        with contextlib.suppress(SandboxError):
            await self._kill()

    async def _kill(self) -> None:
        if self.returncode is None:
            self._agent.kill_tree(self.id)
        try:
            async with asyncio.timeout(_KILL_PATIENCE_S):
                await asyncio.shield(self._exited)
        except TimeoutError:
            raise ExecTimeout(f"the command could not be killed within {_KILL_PATIENCE_S:.0f} s; terminate its sandbox") from None


class Capture:
    """Listener of one captured command: its output comes with, or just before, the notice of its end."""

    __slots__ = ("ended", "err", "expired", "future", "out")

    def __init__(self, future: asyncio.Future[wire.AgentReply]) -> None:
        self.future = future
        self.expired = False
        """Its deadline passed, and its tree was killed."""
        self.ended = False
        self.out: list[bytes] = []
        self.err: list[bytes] = []

    def reply(self, reply: wire.AgentReply, fd: int) -> bool:
        """Listener: a piece of output or the end."""
        if fd >= 0:
            os.close(fd)
        if reply.op not in (wire.OUTPUT, wire.EXIT):
            raise wire.MalformedError(f"an unexpected notice of kind {reply.op}")
        if reply.out_bytes:
            self.out.append(reply.data[: reply.out_bytes])
        if reply.err_bytes:
            self.err.append(reply.data[reply.out_bytes :])
        if reply.op == wire.OUTPUT:
            return False
        self.ended = True
        if not self.future.done():
            self.future.set_result(reply)
        return True

    def completed(self, reply: wire.AgentReply, stopping: str | None) -> Completed:
        """The whole command, from the notice of its end."""
        signalled = os.WIFSIGNALED(reply.status)
        timed_out = self.expired and signalled
        return Completed(
            exit_code=None if timed_out or signalled else os.WEXITSTATUS(reply.status),
            signal=os.WTERMSIG(reply.status) if signalled else None,
            stdout=b"".join(self.out),
            stderr=b"".join(self.err),
            truncated=bool(reply.flags & wire.OUTPUT_TRUNCATED),
            timed_out=timed_out,
            duration_s=reply.duration_us / 1e6,
            gone=stopping,
        )

    def gone(self, error: SandboxGone) -> None:
        """Listener: the sandbox ended first."""
        self.ended = True
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # whoever waited may have been cancelled: nobody owes this a look


def check_size(rows: int, columns: int) -> None:
    """Raises ConfigError for what no terminal can be."""
    for field, value in (("rows", rows), ("columns", columns)):
        if not 0 <= value <= _LARGEST_SIZE:
            raise ConfigError(f"a terminal has 0 to {_LARGEST_SIZE} {field}, not {value}", field=field)


def usage_of(reply: wire.AgentReply) -> Usage:
    """The account in an exit notice."""
    return Usage(
        user_s=reply.user_us / 1e6,
        system_s=reply.system_us / 1e6,
        max_rss_bytes=reply.max_rss_kib * 1024,
        duration_s=reply.duration_us / 1e6,
    )


def exec_failed(number: int, program: str | bytes = "") -> ExecFailed:
    """The error for a command that execve, chdir or fork refused."""
    if number == errno.EBUSY:
        return ExecFailed(number, "the sandbox is frozen; thaw it first")
    what = f"the command {program!r:.200}" if program else "the command"
    if number == errno.EAGAIN:
        return ExecFailed(number, f"{what} could not be started: its sandbox, or this machine, may have no more processes")
    words = number == errno.ENOENT and len(program.split()) > 1
    hint = '; give each word by itself, as in exec("ls", "-l"), or a line to a shell: exec("bash", "-c", line)' if words else ""
    return ExecFailed(number, f"{what} could not be started: {os.strerror(number)}{hint}")
