"""A sandbox on some backend's machine, as the same `Sandbox` as one of this machine's namespaces. In: a spec and a backend. Out: the same
methods; what the backend cannot do is refused with its name.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from functools import partial
from typing import IO, Any, BinaryIO, Final, NoReturn

import msgspec

from sandmill.errors import IsolationUnavailable, SandboxCreateFailed, SandboxError, SandboxFileError, SandboxGone, Unsupported
from sandmill.sandboxes.backends.guest.agent import GuestAgent
from sandmill.sandboxes.backends.guest.copying import Copying, Spool
from sandmill.sandboxes.backends.guest.files import FOLDER, Held, Reading, entries
from sandmill.sandboxes.backends.guest.link import FrameLink
from sandmill.sandboxes.backends.guest.process import BoundedCapture, GuestProcess
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent, Link
from sandmill.sandboxes.backends.native.node import USER_UID, WARDEN
from sandmill.sandboxes.backends.seam import Backend, Machine
from sandmill.sandboxes.commanding import Invocation
from sandmill.sandboxes.commands import Commands
from sandmill.sandboxes.dual import dual
from sandmill.sandboxes.egress.blocked import Blocked
from sandmill.sandboxes.egress.outside import Outside
from sandmill.sandboxes.files import FileEntry, absolute, file_error, open_flags, place
from sandmill.sandboxes.images import HOST, Image, Use
from sandmill.sandboxes.images.image import Account
from sandmill.sandboxes.lifetime import Lifetime
from sandmill.sandboxes.preserving import all_or_none, check_count
from sandmill.sandboxes.process import Capture, Process
from sandmill.sandboxes.sandbox import Sandbox
from sandmill.sandboxes.spec import DEFAULT_WORKDIR, PROCESS_LIMIT, Continuity, SandboxSpec

_DESTROY_S: Final = 30.0
_MAKING_AT_ONCE: Final = 8
_DISKS: Final = 4
"""Writable folders that hold `disk` bytes each, where a backend bounds them one by one (gVisor)."""
_LARGEST_FILE: Final = 1 << 30
_LARGEST_LISTING: Final = 64 << 20
_log = logging.getLogger("sandmill.sandboxes")


class GuestSandbox(Sandbox):
    """A sandbox of a backend."""

    def __init__(self, spec: SandboxSpec, backend: Backend, outside: Outside | None = None) -> None:
        self.id = f"sb-{secrets.token_hex(6)}"
        self.name = self.id
        self.labels: Mapping[str, str] = {}
        self.spec = spec
        self.lifetime = Lifetime(spec, asyncio.get_running_loop())
        self._backend = backend
        self._machine: Machine | None = None
        self._link: FrameLink | None = None
        self._agent: GuestAgent | None = None
        self._gone: SandboxGone | None = None
        self._ending: asyncio.Task[None] | None = None
        self._commands = Commands(spec, rootless=True)

    @property
    def lacks(self) -> str | None:
        """One sentence on what its backend does not hold it to, None when everything holds."""
        return self._backend.lacks(self.spec)

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """What a backend's network refuses is not known here."""
        return ()

    @property
    def backend_id(self) -> str:
        """What the backend calls its machine."""
        return "" if self._machine is None else self._machine.id

    async def _process(self, agent: Agent, command: Invocation) -> tuple[Process, int, tuple[int, ...]]:
        """Its streams come and go with the notices: a guest shares no descriptor with this machine."""
        stdin = command.stdin is not None
        process = GuestProcess(
            agent,
            self._lost,
            with_input=command.tty or stdin,
            terminal=command.tty,
            text=command.text,
            max_output=command.max_output,
            timeout_s=command.timeout_s,
        )
        return process, wire.EXEC_TTY if command.tty else wire.EXEC_INPUT if stdin else 0, ()

    @dual
    async def fork(self, n: int, *, name: str | None = None) -> list[Sandbox]:
        """As on this machine, with a copy of the files in each; one with several names becomes several files."""
        check_count(n)
        files = await self._changed()
        try:
            return await all_or_none(n, name, lambda called: create_guest(self._backend, self.spec, None, called, self.labels, files))
        finally:
            files.close()

    @dual
    async def open(self, path: str, mode: str = "r", *, user: str = "user", encoding: str = "utf-8") -> IO[Any]:
        """A file of the sandbox as a Python file: read at once when opened, written at once when closed."""
        flags, binary = open_flags(mode)
        if flags & (os.O_CREAT | os.O_RDWR):
            await self._fetch(path, flags & ~os.O_APPEND, user, 0)
        keeps = not flags & (os.O_TRUNC | os.O_EXCL)
        contents = await self._fetch(path, os.O_RDONLY, user, _LARGEST_FILE) if keeps else b""
        file: io.BytesIO = Held(contents, partial(self._save, path, user)) if flags & (os.O_WRONLY | os.O_RDWR) else io.BytesIO(contents)
        if flags & os.O_APPEND:
            file.seek(0, io.SEEK_END)
        return file if binary else io.TextIOWrapper(file, encoding=encoding, errors="replace", write_through=True)

    @dual
    async def read(self, path: str, *, user: str = "user", max_bytes: int | None = None) -> bytes:
        """As on this machine; 1 GiB at most."""
        data = await self._fetch(path, os.O_RDONLY, user, _LARGEST_FILE if max_bytes is None else max_bytes + 1)
        if max_bytes is not None and len(data) > max_bytes:
            raise SandboxFileError(errno.EFBIG, f"{path} is longer than {max_bytes} bytes")
        return data

    @dual
    async def list(self, path: str = ".", *, user: str = "user") -> list[FileEntry]:
        """As on this machine."""
        try:
            return entries(await self._fetch(path, os.O_RDONLY | os.O_DIRECTORY, user, _LARGEST_LISTING))
        except wire.MalformedError as error:
            await self.stop(f"its agent broke the protocol: {error}")
            raise SandboxGone(self.name, f"its agent broke the protocol: {error}") from error

    def hand_out(self, name: str | None, labels: Mapping[str, str] | None) -> None:
        """Leaves its pool: named, and from now on it ages."""
        self.name, self.labels = name or self.id, dict(labels or {})
        self.lifetime.start(self)

    async def begin(self, files: bytes, outside: Outside | None = None) -> None:
        """Comes to life. On the sandbox loop, once."""
        await self._be_born(files, None)

    async def take_over(self, files: BinaryIO) -> None:
        """Everything that `_changed` of another found. Nothing runs here yet. Raises SandboxCreateFailed."""
        try:
            process = await self._copier(None)
            await process.feed_from(files)
            await process.finish()
        except SandboxError as error:
            raise SandboxCreateFailed(f"a fork did not take the files of its origin: {error}") from error

    async def _changed(self) -> BinaryIO:
        """Its files as they are now, as far as they were changed since its start; its processes stand still meanwhile."""
        spool = Spool(_DISKS * self.spec.disk_bytes)
        self.lifetime.enter()
        try:
            async with self._alone(), self._still(self._live()):
                process = await self._copier(spool)
                await process.finish()
        except SandboxError as error:
            spool.file.close()
            if isinstance(error, SandboxGone):
                raise
            raise SandboxError(f"the files of sandbox {self.name} could not be copied: {spool.trouble or error}") from error
        except BaseException:
            spool.file.close()
            raise
        finally:
            self.lifetime.leave()
        return spool.file

    async def _copier(self, spool: Spool | None) -> Copying:
        agent, user = self._live(), self._commands.strongest
        process = Copying(agent, self._lost, spool)
        flags, direction = (wire.EXEC_COPY | wire.EXEC_INPUT, "in") if spool is None else (wire.EXEC_COPY, "out")
        agent.send(self._commands.message(flags, process.id, (direction,), None, "/", user))
        await process.begin()
        return process

    async def _be_born(self, files: bytes, egress: socket.socket | None) -> None:
        backend, hearing = self._backend, _Hearing(self)
        mode = "text" if backend.text else "binary"
        arguments = ("guest", mode, self.spec.workdir, str(USER_UID), str(USER_UID), str(PROCESS_LIMIT))
        self._agent = agent = GuestAgent(self._connect, self._lost)
        ready = agent.expect_ready()
        try:
            async with asyncio.timeout(backend.start_s):
                self._machine = await backend.create(self.spec, arguments, hearing)
                reply, _ = await ready
        except TimeoutError as error:
            raise SandboxCreateFailed(f"backend {backend.name} brought up no sandbox within {backend.start_s:g} s") from error
        except SandboxGone as error:
            raise SandboxCreateFailed(f"backend {backend.name} could not start a sandbox: {error.reason}") from error
        text = reply.data.decode("utf-8", "replace")
        if reply.status:
            raise SandboxCreateFailed(reply.status, f"could not make the workdir {text}: {os.strerror(reply.status)}")
        self._commands = _commands(self.spec, text)
        if files:
            await self.write_batch(files, "user")

    def _connect(self, *callbacks: Any) -> Link:
        self._link = link = FrameLink(self._send, *callbacks, text=self._backend.text)
        return link

    def _send(self, data: bytes) -> None:
        if self._machine is not None:
            self._machine.send(data)

    def _live(self) -> GuestAgent:
        super()._live()
        assert self._agent is not None
        return self._agent

    def _capture(self, future: asyncio.Future[wire.AgentReply], max_output: int) -> Capture:
        return BoundedCapture(future, max_output)

    def _lost(self, why: str) -> None:
        self._gone = self._gone or SandboxGone(self.name, why or "its init process died")
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(self._gone.reason, False))

    async def _end(self, reason: str, gently: bool) -> None:
        self.lifetime.stop(reason)
        self._gone = self._gone or SandboxGone(self.name, reason)
        if gently and self._agent is not None:
            await self._end_commands(self._agent)
        if self._agent is not None:
            self._agent.close(self._gone)
        if self._machine is not None:
            try:
                async with asyncio.timeout(_DESTROY_S):
                    await self._machine.destroy()
            except (SandboxError, OSError) as error:
                _log.warning(
                    "sandbox %s of backend %s may not be removed: %s", self._machine.id, self._backend.name, error or type(error).__name__
                )

    async def _fetch(self, path: str, flags: int, user: str, limit: int) -> bytes:
        """What is behind a path opened with these flags, `limit` bytes at most."""
        agent, reading = self._live(), Reading(limit if not flags & os.O_DIRECTORY else _LARGEST_LISTING)
        message = partial(wire.agent_request, wire.OPEN, payload=absolute(path, self.spec.workdir) + b"\0", who=self._commands.who(user))
        parents = wire.OPEN_PARENTS if flags & os.O_CREAT else 0
        id = agent.listen(reading)
        agent.send(message(id=id, flags=parents, first=flags, second=0o644, max_output=limit))
        reply = await agent.in_time(reading.future)
        if reply.status:
            raise file_error(reply.status, path)
        if bool(reply.flags & FOLDER) != bool(flags & os.O_DIRECTORY):
            raise file_error(errno.EISDIR if reply.flags & FOLDER else errno.ENOTDIR, path)
        return reading.contents

    def _save(self, path: str, user: str, data: bytes) -> None:
        self.write(path, data, user=user)

    def _refuse(self, feature: str, instead: str = "") -> NoReturn:
        raise Unsupported(self._backend.name, feature, instead)

    async def _seal(self, agent: Agent) -> NoReturn:
        self._refuse("make an image of a sandbox's files", "fork it, or use backend native")

    async def _revive(self, spec: SandboxSpec, image: Image, use: Use | None) -> NoReturn:
        self._refuse("start a sandbox again", "use backend native")


class _Hearing:
    """Brings a machine's words to its sandbox."""

    def __init__(self, sandbox: GuestSandbox) -> None:
        self._sandbox = sandbox

    def received(self, data: bytes) -> None:
        if self._sandbox._link is not None:
            self._sandbox._link.received(data)

    def ended(self, why: str) -> None:
        sandbox = self._sandbox
        if sandbox._gone is None and sandbox._agent is not None:
            sandbox._lost(why)


def _commands(spec: SandboxSpec, who: str) -> Commands:
    """As the guest can run them: "1000 1000 root", or only as who it is itself. Raises SandboxCreateFailed."""
    try:
        uid, gid, *root = who.split()
        account = Account(uid=int(uid), gid=int(gid))
    except ValueError:
        raise SandboxCreateFailed(f"the guest's first words make no sense: {who!a}") from None
    image = HOST if spec.image is None else msgspec.structs.replace(HOST, on_host=False)
    return Commands(spec, rootless=not root, image=msgspec.structs.replace(image, account=account))


_rooms: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Semaphore] = {}


async def create_guest(
    backend: Backend,
    spec: SandboxSpec,
    files: Mapping[str, bytes | str] | None,
    name: str | None,
    labels: Mapping[str, str] | None,
    origin: BinaryIO | None = None,
) -> GuestSandbox:
    """A sandbox of this backend; with the files of another, `origin`, in it.

    Raises Unsupported, ConfigError, IsolationUnavailable, SandboxCreateFailed.
    """
    if spec.continuity is not Continuity.EPHEMERAL:
        raise Unsupported(backend.name, "keep a stopped sandbox's files", "use continuity Ephemeral")
    spec = msgspec.structs.replace(spec, workdir=spec.workdir or DEFAULT_WORKDIR)
    backend.check(spec)
    payload = place(files or {}, spec.workdir)
    if not WARDEN.exists():
        raise IsolationUnavailable("the sandbox guest was not built; install sandmill again with a C compiler present")
    room = _rooms.setdefault((asyncio.get_running_loop(), backend.name), asyncio.Semaphore(_MAKING_AT_ONCE))
    async with room:
        sandbox = GuestSandbox(spec, backend)
        try:
            await sandbox.begin(payload)
            if origin is not None:
                await sandbox.take_over(origin)
        except BaseException:
            await asyncio.shield(sandbox.stop("creation failed"))
            raise
    sandbox.hand_out(name, labels)
    return sandbox
