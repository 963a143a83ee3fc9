"""A package loaded in a sandbox of its own. In: an image, an adapter and its options. Out: the package's answers, each within a deadline.

The worker is root of its sandbox, so that each call can be another user; what a call runs is nobody. Everything lives on the sandbox
loop and may be awaited from any loop. A worker that breaks is never mended: its sandbox ends, and with it whatever a grader may have left
there; the next call gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from sandmill.environments.access.access import Access
from sandmill.environments.access.meter import Meter, present_meter
from sandmill.environments.packages import frames
from sandmill.environments.packages.asking import Asking
from sandmill.environments.packages.protocol import Description, Failure, Members, Request, Row, Rows, Score, frame, read
from sandmill.errors import GraderFailed, SandboxError, SandboxGone
from sandmill.sandboxes import PIPE, Process, Sandbox, SandboxSpec
from sandmill.sandboxes.dual import hop

R = TypeVar("R")
M = TypeVar("M", bound=msgspec.Struct)

WORKDIR: Final = "/opt/worker"
_PROGRAM: Final = f"{WORKDIR}/program"
_MODULES: Final = "sandmill/environments/packages"
_PROGRAMS: Final = ("answers.py", "door.py", "frames.py", "session.py", "worker.py")
_ADAPTER: Final = f"{WORKDIR}/adapter.py"
LOAD_TIMEOUT_S: Final = 300.0
_LATE_S: Final = 10.0
"""How much longer than a call's deadline, which the worker keeps, it may stay silent altogether."""
_FOREVER: Final = "8760h"
_ENV: Final = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
}


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How a package is started. `image` None: an adapter that needs nothing installed."""

    adapter: str
    """Source of the adapter module, whose `load(options)` returns the adapter."""
    beside: Mapping[str, str] = {}
    """Sources of modules that it imports, by name."""
    options: Mapping[str, Any] = {}
    image: str | None = None
    python: str = "/usr/bin/python3"
    memory: int | str = "2Gi"
    disk: int | str = "256Mi"
    cpu: float | str = 2
    load_timeout_s: float = LOAD_TIMEOUT_S
    access: Access = Access()
    """What its graders may use."""


class Lost(GraderFailed):
    """A package that can no longer be asked: its process or its sandbox ended, or it spoke out of turn."""


class Raised(GraderFailed):
    """A call raised, or what it gave was nothing sound. Its session's process lives, and can be asked again."""


class LoadedPackage:
    """One worker. `LoadedPackage.start` makes it, `close` ends it."""

    def __init__(self, sandbox: Sandbox, process: Process, access: Access) -> None:
        self._asking = Asking(access.broker, lambda data: self._outgoing.put_nowait(data))
        self._sandbox = sandbox
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._ended: dict[int, Failure] = {}
        """Sessions that ended while nobody waited for them."""
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._broken: str | None = None
        self._kinds = (frames.REPLY, frames.FAILED, *([] if access.broker is None else [frames.ASK]))
        loop = asyncio.get_running_loop()
        self._tasks = (loop.create_task(self._read()), loop.create_task(self._write()))
        self.description: Description

    @classmethod
    async def start(cls, launch: Launch) -> LoadedPackage:
        """Loads the package in a fresh sandbox. Raises GraderFailed (with the package's own reason), TimeoutError, SandboxError."""
        return await hop(_shielded(cls._start(launch)))

    @classmethod
    async def _start(cls, launch: Launch) -> LoadedPackage:
        spec = SandboxSpec.of(
            cpu=launch.cpu,
            memory=launch.memory,
            disk=launch.disk,
            timeout=_FOREVER,
            idle_timeout=_FOREVER,
            network=launch.access.network,
            env={**_ENV, **launch.access.environment},
            workdir=WORKDIR,
            image=launch.image,
        )
        files = {f"program/{_MODULES}/{name}": Path(__file__).with_name(name).read_bytes() for name in _PROGRAMS}
        files |= {f"program/{name}.py": source.encode() for name, source in launch.beside.items()}
        files["adapter.py"] = launch.adapter.encode()
        sandbox = await Sandbox.from_spec.aio(spec, files=files, server="")
        try:
            process = await sandbox.exec.aio(
                launch.python,
                "-s",
                f"{_PROGRAM}/{_MODULES}/worker.py",
                env={"PYTHONPATH": _PROGRAM, "PYTHONSAFEPATH": "1"},
                user="user" if os.geteuid() else "root",
                stdin=PIPE,
                text=False,
                max_output=2 * frames.LARGEST_BYTES,
            )
            package = cls(sandbox, process, launch.access)
            body = msgspec.json.encode({"adapter": _ADAPTER, "options": launch.options})
            answer = await package._ask(frames.LOAD, 0, body, launch.load_timeout_s, late_s=0.0)
            package.description = read(answer, Description, "the package's description")
        except BaseException:
            await sandbox.terminate.aio()
            raise
        return package

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._broken is None and self._sandbox.alive

    async def tasks(self, split: str, start: int, stop: int, *, timeout_s: float) -> tuple[Row, ...]:
        """Tasks of a split by number, fewer where it ends. Raises GraderFailed, TimeoutError."""
        answer = await self.once("tasks", {"split": split, "start": start, "stop": stop}, timeout_s=timeout_s)
        rows = read(b'{"rows":' + answer + b"}", Rows, f"a task of split {split!a}").rows
        if len(rows) > stop - start:
            raise GraderFailed(f"split {split!a} has {len(rows)} tasks between {start} and {stop}")
        return tuple(msgspec.structs.replace(row, row=row.row.copy()) for row in rows)

    async def grade(self, row: msgspec.Raw, answer: str | None, context: Mapping[str, Any] | None = None, *, timeout_s: float) -> Score:
        """What the package's grader says to an answer. Raises GraderFailed, TimeoutError."""
        params = {"row": row, "answer": answer, "context": context or {}}
        return read(await self.once("grade", params, timeout_s=timeout_s), Score, "the grader's answer")

    async def grade_group(self, row: msgspec.Raw, members: Sequence[Mapping[str, Any] | msgspec.Raw], *, timeout_s: float) -> Members:
        """What the package's grader says to the episodes of one row, graded together. Raises GraderFailed, TimeoutError."""
        answer = await self.once("grade_group", {"row": row, "members": members}, timeout_s=timeout_s)
        found = read(b'{"members":' + answer + b"}", Members, "the grader's answer to a group")
        if len(found.members) != len(members):
            raise GraderFailed(f"the grader gave {len(found.members)} scores for a group of {len(members)}")
        return found

    async def once(self, method: str, params: Mapping[str, Any], *, timeout_s: float, seed: int | None = None) -> bytes:
        """One call in a process of its own, which is dead when this returns."""
        body = msgspec.json.encode(Request(method=method, params=params, seed=seed))
        return await hop(self._once(next(self._numbers), body, timeout_s, present_meter()))

    async def _once(self, number: int, body: bytes, timeout_s: float, meter: Meter | None) -> bytes:
        async with self._asking.of(number, meter):
            return await self._ask(frames.ONCE, number, body, timeout_s)

    def session(self) -> PackageSession:
        """A process for several calls. What it asks outside belongs to the attempt that this is called in."""
        number = next(self._numbers)
        self._asking.begin(number, present_meter())
        return PackageSession(self, number)

    async def close(self) -> None:
        """Ends the sandbox and all in it. Idempotent."""
        await hop(self._close("it was closed"))

    async def _ask(self, kind: int, session: int, body: bytes, timeout_s: float, late_s: float = _LATE_S) -> bytes:
        if self._broken is not None:
            raise Lost(f"the package's process is gone: {self._broken}")
        if failed := self._ended.pop(session, None):
            raise _error(failed, timeout_s)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[session] = future
        try:
            self._outgoing.put_nowait(frame(kind, session, body, timeout_s if late_s else 0.0))
            async with asyncio.timeout(timeout_s + late_s):
                return await future
        except _Refused as error:
            raise _error(error.failure, timeout_s) from None
        except TimeoutError:
            await self._close("it stopped answering")
            raise TimeoutError(f"the package took longer than {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.end(session)
            raise
        finally:
            self._waiting.pop(session, None)

    def end(self, session: int) -> None:
        """Kills a session's process. On the sandbox loop."""
        self._ended.pop(session, None)
        if self._broken is None:
            self._outgoing.put_nowait(frame(frames.END, session, b""))

    async def _write(self) -> None:
        with contextlib.suppress(OSError, SandboxError):
            while True:
                await self._process.stdin.write.aio(await self._outgoing.get())

    async def _read(self) -> None:
        """Frames in; ends the worker at the first that is none."""
        reason = "it ended"
        try:
            buffer = bytearray()
            async for piece in self._process.stdout:
                assert isinstance(piece, bytes)
                buffer += piece
                self._take(buffer)
            reason = await self._ending()
        except GraderFailed as error:
            reason = str(error)
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and every sandbox with it
            await self._close(reason)

    def _take(self, buffer: bytearray) -> None:
        while len(buffer) >= frames.HEADER.size:
            size, _, kind, _ = frames.HEADER.unpack_from(buffer)
            if size > frames.LARGEST_BYTES or kind not in self._kinds:
                raise Lost(f"it sent a frame of kind {kind} with {size} bytes, which is none")
            if (frame := frames.taken(buffer)) is None:
                return
            session, _, number, body = frame
            if kind == frames.ASK:
                self._asking.hear(session, number, body)
            else:
                self._deliver(session, kind, body)

    def _deliver(self, session: int, kind: int, body: bytes) -> None:
        future = self._waiting.get(session)
        if kind == frames.FAILED:
            try:
                failure = read(body, Failure, "the reason for a failure")
            except GraderFailed as error:  # the worker's own are sound: a grader's process wrote this one
                failure = Failure(cause="raised", reason=str(error))
            if future is None and len(self._ended) < 10_000:
                self._ended[session] = failure
            elif future is not None and not future.done():
                future.set_exception(_Refused(failure))
        elif future is not None and not future.done():
            future.set_result(body)

    async def _ending(self) -> str:
        try:
            code = await self._process.wait.aio(timeout=1.0)
        except SandboxGone as error:
            return error.reason
        except SandboxError:
            return "it closed its output"
        return f"it ended with exit code {code}" if code >= 0 else f"signal {-code} ended it"

    async def _close(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Lost(f"the package's process is gone: {reason}"))
            current = asyncio.current_task()
            for task in self._tasks:
                if task is not current:
                    task.cancel()
        await self._asking.close()
        await self._sandbox.terminate.aio()


class PackageSession:
    """Calls that one process answers, one after the other: an episode of several turns."""

    def __init__(self, package: LoadedPackage, number: int) -> None:
        self._package = package
        self._number = number

    async def call(self, method: str, params: Mapping[str, Any], kind: type[M], *, timeout_s: float, seed: int | None = None) -> M:
        """One call. After a failure the process may be gone. Raises GraderFailed, TimeoutError."""
        body = msgspec.json.encode(Request(method=method, params=params, seed=seed))
        answer = await hop(self._call(body, timeout_s, last=method == "finish"))
        return read(answer, kind, f"the package's answer to {method}")

    async def _call(self, body: bytes, timeout_s: float, *, last: bool) -> bytes:
        """What still asks when the score is there has no part in it."""
        try:
            return await self._package._ask(frames.CALL, self._number, body, timeout_s)
        finally:
            if last:
                await self._package._asking.settle(self._number)

    async def close(self) -> None:
        """Kills the process. Idempotent."""
        await hop(self._end())

    async def _end(self) -> None:
        self._package.end(self._number)
        await self._package._asking.end(self._number)


class _Refused(Exception):
    """Carries the worker's reason to whoever asked."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def _error(failure: Failure, timeout_s: float) -> Exception:
    if failure.cause == "deadline":
        return TimeoutError(f"the package took longer than {timeout_s:g} s")
    return Raised(failure.reason) if failure.cause == "raised" else GraderFailed(failure.reason)


async def _shielded(work: Coroutine[Any, Any, LoadedPackage]) -> LoadedPackage:
    """A start that nobody waits for any more leaves no sandbox behind."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await (await task)._close("nobody waits for it")
        raise
