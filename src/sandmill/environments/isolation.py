"""Graders that nobody vouches for run in child processes that can be killed. In: a reference to an environment; out: verdicts.

A grader that computes for ever would stop the event loop that every episode lives on, and no timeout could fire; one that uses signals
needs a main thread of its own. Each child loads the environment once and grades one episode at a time; when the deadline passes, it is
killed with everything it started, and the next episode gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Mapping

import msgspec

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.environment import Artifacts, Environment, with_optional
from sandmill.environments.task import Submission, Task, Verdict
from sandmill.environments.wrapped import WrappedEnvironment
from sandmill.errors import GraderFailed

START_TIMEOUT_S = 120.0
"""Importing and generating a large environment may take this long in each child."""
LARGEST_FRAME_BYTES = 256 << 20
HEADER = struct.Struct(">I")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to a child: what to load, and where Python looks for it."""

    reference: str
    section: EnvironmentSection
    path: tuple[str, ...]


class GradeCall(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to grade."""

    task: Task
    submission: Submission
    artifacts: Mapping[str, bytes]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """From a child: `digest` once loaded, then a verdict per call, or the reason why there is none."""

    digest: str | None = None
    verdict: Verdict | None = None
    failure: str | None = None


class IsolatedEnvironment(WrappedEnvironment):
    """An environment whose `grade` runs in child processes, at most `size` at once; everything else is the environment's own.

    Belongs to the event loop it first grades on. Children end with this process even if `close` is never called.
    """

    def __init__(self, environment: Environment, reference: str, section: EnvironmentSection, size: int = 2) -> None:
        super().__init__(environment)
        self._hello = Hello(reference=reference, section=section, path=tuple(sys.path))
        self._size = size
        self._slots: asyncio.Semaphore | None = None
        self._idle: list[_Child] = []

    @contextlib.asynccontextmanager
    async def grading_turn(self) -> AsyncIterator[None]:
        """Waits for one of the children, starting it if need be; the deadline of a grader begins after this."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._size)
        async with self._slots:
            self._idle = [child for child in self._idle if child.alive]
            if not self._idle:
                self._idle.append(await _Child.start(self._hello, self._inner.digest))
            yield

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """As the environment's own grader, in a child. Cancelling kills the child. Raises GraderFailed."""
        child = self._idle.pop() if self._idle else await _Child.start(self._hello, self._inner.digest)
        try:
            reply = await child.ask(GradeCall(task=task, submission=submission, artifacts=artifacts))
        except BaseException:
            await child.end()
            raise
        self._idle.append(child)
        if reply.verdict is None:
            raise GraderFailed(reply.failure or "the grader gave neither a verdict nor a reason")
        return reply.verdict

    async def close(self) -> None:
        """Ends all idle children. Idempotent."""
        children, self._idle = self._idle, []
        for child in children:
            await child.end()


def isolated(environment: Environment, reference: str, section: EnvironmentSection) -> IsolatedEnvironment:
    """The environment with its grader in child processes, and with the optional members that it has itself."""
    return with_optional(IsolatedEnvironment(environment, reference, section), environment)


class _Child:
    """One grading process and its pipe."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._decoder = msgspec.msgpack.Decoder(Reply)

    @classmethod
    async def start(cls, hello: Hello, digest: str) -> _Child:
        """A child that has loaded the environment. Raises GraderFailed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sandmill.environments.grader",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(hello.path)},
            start_new_session=True,
        )
        child = cls(process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await child.ask(hello)
            if reply.failure is not None:
                raise GraderFailed(f"a grading process could not load {hello.reference}: {reply.failure}")
            if reply.digest != digest:
                raise GraderFailed(
                    f"{hello.reference} is not the same in a grading process (its digest differs): it must not depend on chance or time"
                )
        except BaseException:
            await child.end()
            raise
        return child

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, message: Hello | GradeCall) -> Reply:
        """Sends a frame and waits for the answer; ends when the child does. Raises GraderFailed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise GraderFailed("the grading process has no pipes")
        body = msgspec.msgpack.encode(message)
        try:
            stdin.write(HEADER.pack(len(body)) + body)
            await stdin.drain()
            (length,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
            if length > LARGEST_FRAME_BYTES:
                raise GraderFailed(f"the grading process announced {length} bytes")
            return self._decoder.decode(await stdout.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            code = await self._exit_code()
            raise GraderFailed(f"the grading process ended (exit code {code}) before it gave a verdict") from error
        except msgspec.DecodeError as error:
            raise GraderFailed(f"the grading process sent something that is no verdict: {error}") from error

    async def _exit_code(self) -> int | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return await self._process.wait()
        return None

    async def end(self) -> None:
        """Kills the child and all it started, and reaps it. Idempotent, and complete even while this task is cancelled."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.shield(asyncio.ensure_future(self._process.wait()))
