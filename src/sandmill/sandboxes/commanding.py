"""A sandbox's commands while it lives. In: words, and where they are to run. Out: running processes, or what became of them.

A command's deadline and its kill are kept here; how it is watched while it runs is process.py's.
"""

from __future__ import annotations

import abc
import asyncio
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from sandmill.errors import ConfigError, SandboxError, SandboxGone
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.commands import Commands, Three, other_end, pipes
from sandmill.sandboxes.dual import dual
from sandmill.sandboxes.lifetime import Lifetime
from sandmill.sandboxes.process import Capture, Completed, Process, Stdin, exec_failed
from sandmill.sandboxes.spec import seconds

DEFAULT_MAX_OUTPUT: Final = 1 << 20
"""Bytes of output kept per stream."""
_KILL_PATIENCE_S: Final = 5.0


class Invocation(NamedTuple):
    """What is to run, and how it is connected. `stdin`: None (closed), what to feed, or PIPE. `timeout_s`: seconds, None for ever."""

    argv: tuple[str | bytes, ...]
    env: Mapping[str, str] | None
    workdir: str | None
    user: str
    timeout_s: float | None
    stdin: bytes | str | Stdin | None
    max_output: int
    text: bool = False
    tty: bool = False

    @property
    def fed(self) -> bytes | None:
        """Its whole standard input, where that is known beforehand."""
        return None if self.stdin is None or isinstance(self.stdin, Stdin) else wire.encode(self.stdin)


class Commanding(abc.ABC):
    """The part of `Sandbox` that runs commands."""

    name: str
    lifetime: Lifetime
    _commands: Commands

    @abc.abstractmethod
    def _live(self) -> Agent:
        """The agent. Raises SandboxGone."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """False once it has ended."""

    @abc.abstractmethod
    async def _startable(self) -> Agent:
        """The agent, where a command may start now. Raises SandboxGone, ExecFailed."""

    @abc.abstractmethod
    async def stop(self, reason: str, *, gently: bool = False) -> None:
        """Ends the sandbox."""

    @abc.abstractmethod
    async def _path_request(self, op: int, path: str, user: str, *, flags: int = 0, first: int = 0, second: int = 0) -> int:
        """Has the agent act on a path; the descriptor that comes back, -1 without one."""

    @dual
    async def exec(
        self,
        *argv: str | bytes,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str = "user",
        timeout: float | str | None = None,
        stdin: bytes | str | Stdin | None = None,
        text: bool = True,
        tty: bool = False,
        max_output: int = DEFAULT_MAX_OUTPUT,
    ) -> Process:
        """Starts a command and returns while it runs. Raises ExecFailed (nothing ran), ConfigError, SandboxGone.

        `stdin`: None (closed), bytes or text to feed, or PIPE. `tty`: on a pseudo-terminal, whose one stream is `stdout`. After
        `timeout` (seconds, or "5m") its whole process tree is killed. `max_output`: bytes per stream that wait unread at most (process.py).
        """
        return await self._start(Invocation(argv, env, workdir, user, seconds(timeout), stdin, max_output, text, tty))

    async def _start(self, command: Invocation) -> Process:
        agent, feed = await self._startable(), command.fed
        process, flags, fds = await self._process(agent, command)
        try:
            message = self._commands.message(flags, process.id, command.argv, command.env, command.workdir, command.user, fds=fds)
        except (SandboxError, ConfigError) as error:
            process.refuse(error)
            for fd in set(fds):
                os.close(fd)
            raise
        agent.send(message, close=tuple(set(fds)))
        process.program = command.argv[0]
        self.lifetime.enter()
        process.on_exit(self.lifetime.leave)
        await process.begin()
        if feed is not None:
            asyncio.get_running_loop().create_task(process.feed(feed))
        return process

    async def _process(self, agent: Agent, command: Invocation) -> tuple[Process, int, tuple[int, ...]]:
        """A command's process before it runs, the request's flags, and the command's own descriptors, which go with the request."""
        ours, theirs = await self._terminal(command.user) if command.tty else pipes(with_stdin=command.stdin is not None)
        process = Process(agent, ours[1], ours[2], ours[0], text=command.text, max_output=command.max_output, timeout_s=command.timeout_s)
        return process, wire.EXEC_TTY if command.tty else 0, theirs

    @dual
    async def run(
        self,
        *argv: str | bytes,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str = "user",
        timeout: float | str | None = None,
        stdin: bytes | str = b"",
        max_output: int = DEFAULT_MAX_OUTPUT,
        merge_stderr: bool = False,
    ) -> Completed:
        """Runs a command to its end. At most `max_output` bytes of each stream are kept (at the source); the rest is dropped with a flag.

        After `timeout` (seconds, or "5m") the command's whole process tree is killed and what it wrote is returned. Raises
        ExecFailed (nothing ran), ConfigError, SandboxGone.
        """
        return await self._complete(Invocation(argv, env, workdir, user, seconds(timeout), stdin, max_output), merge_stderr=merge_stderr)

    async def _complete(self, command: Invocation, *, merge_stderr: bool) -> Completed:
        agent, loop = await self._startable(), asyncio.get_running_loop()
        capture = self._capture(loop.create_future(), command.max_output)
        id = agent.listen(capture)
        flags = wire.EXEC_CAPTURE | (wire.EXEC_MERGE if merge_stderr else 0)
        try:
            message = self._commands.message(
                flags,
                id,
                command.argv,
                command.env,
                command.workdir,
                command.user,
                stdin=command.fed or b"",
                max_output=command.max_output,
            )
        except (SandboxError, ConfigError):
            agent.forget(id)
            raise
        agent.send(message)
        self.lifetime.enter()
        deadline = None if command.timeout_s is None else loop.call_later(command.timeout_s, self._expire, id, capture)
        try:
            reply = await capture.future
        except asyncio.CancelledError:
            agent.kill_tree(id)
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
            self.lifetime.leave()
        if reply.flags & wire.NOT_STARTED:
            raise exec_failed(reply.status, command.argv[0])
        return capture.completed(reply, self.lifetime.stopping)

    @dual
    async def kill_processes(self) -> None:
        """Kills every process in the sandbox, background ones included, and returns when all are dead. Its files stay readable."""
        try:
            async with asyncio.timeout(_KILL_PATIENCE_S):
                await self._live().ask(wire.KILL_ALL)
        except TimeoutError:
            await self.stop("its processes could not be killed")
            raise SandboxGone(self.name, "its processes could not be killed") from None

    def _expire(self, id: int, capture: Capture) -> None:
        """A command's deadline. If even the kill has no effect, the sandbox ends."""
        if self.alive:
            capture.expired = True
            self._live().kill_tree(id)
            asyncio.get_running_loop().call_later(_KILL_PATIENCE_S, self._give_up, capture)

    def _give_up(self, capture: Capture) -> None:
        if not capture.ended:
            asyncio.get_running_loop().create_task(self.stop("a command could not be killed"))

    def _capture(self, future: asyncio.Future[wire.AgentReply], max_output: int) -> Capture:
        """Who takes a captured command's output, which its agent bounds."""
        return Capture(future)

    async def _terminal(self, user: str) -> tuple[Three, Three]:
        """A pseudo-terminal of the sandbox's own devpts: our end, and three of the command's."""
        master = await self._path_request(wire.OPEN, "/dev/ptmx", user, first=os.O_RDWR | os.O_NOCTTY)
        try:
            end = other_end(master)
            return (os.dup(master), master, -1), (end, end, end)
        except BaseException:
            os.close(master)
            raise
