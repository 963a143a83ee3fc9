"""This process's warden. In: specs. Out: sandboxes' agent sockets; and their removal, accounted for.

The warden is started by the first sandbox and lives as long as this process. If it dies, every sandbox dies with it (the kernel
sees to that), this side removes what it leaves on disk, and the next creation starts another.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import functools
import logging
import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from sandmill.errors import IsolationUnavailable, SandboxCreateFailed
from sandmill.sandboxes import dual
from sandmill.sandboxes.backends.native import cgroups, image, state, wire
from sandmill.sandboxes.backends.native.channel import Channel
from sandmill.sandboxes.registry import Registry
from sandmill.sandboxes.spec import PROCESS_LIMIT, EgressMode, SandboxSpec

WARDEN: Final = Path(__file__).parents[2] / "warden" / "warden"
UID_BASE: Final = 0x7000_0000
"""Host uid of in-sandbox root: far above every range that distributions hand out."""
USER_UID: Final = 1000
_CONCURRENT_CREATIONS: Final = 16
_ANSWER_S: Final = 30.0
_LEAVE_S: Final = 10.0
_EGRESS: Final = {EgressMode.DENY: 0, EgressMode.ALLOW: wire.EGRESS_ALLOW, EgressMode.OPEN: wire.EGRESS_OPEN}
_NO_MAPPED_STORE: Final = (
    "images need a state folder on a file system whose mounts can map ids (ext4, xfs, btrfs, tmpfs), which {} is not; set SANDMILL_STATE"
)
_log = logging.getLogger("sandmill.sandboxes")


class Birth(NamedTuple):
    """A created sandbox: the warden's name for it, its init's host pid, and the socket to its agent."""

    slot: int
    pid: int
    agent: socket.socket


class Base(NamedTuple):
    """What an image gives a sandbox: names of layers in the store, the topmost first; and who its commands run as (wire.identity)."""

    layers: tuple[str, ...]
    on_host: bool
    who: int


class Node:
    """A running warden and the conversation with it. Lives on the sandbox loop."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket, claim: state.Claim, plan: cgroups.CgroupPlan) -> None:
        self.claim = claim
        self.plan = plan
        self.rootless = os.geteuid() != 0
        self.alive = True
        self.proven = False
        """A sandbox came up whole: this machine can do all of it, so later ones may report before their last steps."""
        self.registry = Registry()
        self.creations = asyncio.Semaphore(_CONCURRENT_CREATIONS)
        self._process = process
        self._sequence = 0
        self._waiting: dict[int, asyncio.Future[tuple[wire.WardenReply, int]]] = {}
        self._channel = Channel(asyncio.get_running_loop(), end, self._answered, self._ended)

    @property
    def lacks(self) -> str | None:
        """One sentence on what sandboxes of this process do without, None when nothing."""
        if self.rootless:
            return "without root, sandboxes have no cpu limit, a memory limit only per process, and no in-sandbox root user"
        if not self.plan.version:
            return f"sandboxes have no cpu limit and a memory limit only per process, because {self.plan.lack}"
        return None

    async def create(self, spec: SandboxSpec, files: bytes, base: Base | None = None, egress: socket.socket | None = None) -> Birth:
        """Asks for a sandbox; its agent reports by itself when it is ready. Raises SandboxCreateFailed.

        `egress`: over which the sandbox's listening sockets come back, when it is to have a network.
        """
        layers = b"" if base is None else ":".join(base.layers).encode() + b"\0"
        flags = 0 if base is None else wire.CREATE_IMAGE | (wire.CREATE_ON_HOST if base.on_host else 0)
        reply, fd = await self._ask(
            wire.CREATE,
            wire.encode(spec.workdir) + b"\0" + layers + files,
            flags=flags | _EGRESS[spec.network.mode] | (wire.CREATE_PROVEN if self.proven else 0),
            memory_bytes=spec.memory_bytes,
            disk_bytes=spec.disk_bytes,
            cpu_us=_cpu_quota(spec.cpu),
            processes=PROCESS_LIMIT,
            who=wire.identity(USER_UID, USER_UID) if base is None else base.who,
            fds=() if egress is None else (egress.fileno(),),
        )
        if reply.error == errno.EINVAL and reply.stage == "image store's ids":
            raise IsolationUnavailable(_NO_MAPPED_STORE.format(state.state_root()))
        if reply.error:
            raise SandboxCreateFailed(reply.error, f"could not create a sandbox: {reply.stage}: {os.strerror(reply.error)}")
        return Birth(reply.slot, reply.pid, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd))

    async def destroy(self, slot: int) -> wire.WardenReply | None:
        """Kills a sandbox and removes what belongs to it; returns its account, or None when the warden is gone and all with it."""
        if not self.alive:
            return None
        try:
            return (await self._ask(wire.DESTROY, slot=slot))[0]
        except SandboxCreateFailed:
            return None

    def hurry(self, slot: int, on: bool, cores: float) -> None:
        """While a sandbox's processes are being killed it gets all the cpu time it can use: throttled, they would die slowly."""
        if self.alive:
            self._channel.send(wire.warden_request(wire.HURRY, 0, flags=wire.HURRY_ON if on else 0, slot=slot, cpu_us=_cpu_quota(cores)))

    async def setup(self) -> None:
        """The first message. Raises IsolationUnavailable when this machine cannot do it."""
        reply, _ = await self._ask(wire.SETUP, image.skeleton())
        if reply.error:
            raise IsolationUnavailable(
                f"this machine cannot isolate processes: {reply.stage}: {os.strerror(reply.error)}; `sandmill doctor` shows what is missing"
            )

    def abandon(self) -> None:
        """Closes the conversation: the warden removes everything, itself included. Waits for that, for some seconds."""
        self.alive = False
        self.registry.close()
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        for descriptor in (self.claim.lock, self.claim.folder_fd):
            os.close(descriptor)
        state.discard(self.claim.folder)

    async def _ask(self, op: int, payload: bytes = b"", *, fds: tuple[int, ...] = (), **fields: int) -> tuple[wire.WardenReply, int]:
        if not self.alive:
            raise SandboxCreateFailed("the sandbox warden has died; the next creation starts another")
        self._sequence += 1
        sequence = self._sequence
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[wire.WardenReply, int]] = loop.create_future()
        self._waiting[sequence] = future
        self._channel.send(wire.warden_request(op, sequence, payload, fds=fds, **fields))
        deadline = loop.call_later(_ANSWER_S, self._overdue, future)
        try:
            return await future  # no shield: its callbacks are two more turns of the loop in every creation
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:  # the answer came between the cancellation and its delivery
                self._unwanted(*future.result())
            raise
        finally:
            deadline.cancel()

    def _overdue(self, future: asyncio.Future[tuple[wire.WardenReply, int]]) -> None:
        if not future.done():
            future.set_exception(SandboxCreateFailed(f"the sandbox warden did not answer within {_ANSWER_S:.0f} s"))

    def _unwanted(self, reply: wire.WardenReply, fd: int) -> None:
        """An answer for someone who no longer waits: a sandbox that was created meanwhile must not stay."""
        if fd >= 0:
            os.close(fd)
        if reply.op == wire.CREATE and not reply.error and self.alive:
            self._channel.send(wire.warden_request(wire.DESTROY, 0, slot=reply.slot))

    def _answered(self, data: bytes, fd: int) -> None:
        reply = wire.parse_warden_reply(data)
        future = self._waiting.pop(reply.sequence, None)
        if future is not None and not future.done():
            future.set_result((reply, fd))
        else:
            self._unwanted(reply, fd)

    def _ended(self) -> None:
        self.alive = False
        for future in (future for future in self._waiting.values() if not future.done()):
            future.set_exception(SandboxCreateFailed("the sandbox warden has died; the next creation starts another"))
            future.exception()
        self._waiting.clear()
        self.registry.stop_all("the sandbox warden died")
        asyncio.get_running_loop().run_in_executor(None, self.abandon)


_node: Node | None = None
_starting: asyncio.Task[Node] | None = None


async def node() -> Node:
    """The running node, started if need be. Raises IsolationUnavailable."""
    global _starting
    if _node is not None and _node.alive:
        return _node
    if _starting is None:
        _starting = asyncio.get_running_loop().create_task(_start())
        _starting.add_done_callback(_started)
    return await asyncio.shield(_starting)


def _started(_: asyncio.Task[Node]) -> None:
    global _starting
    _starting = None


async def _start() -> Node:
    global _node
    if not WARDEN.exists():
        raise IsolationUnavailable(
            "the sandbox warden was not built with this installation; run `pip install` again with a C compiler present"
        )
    _allow_many_descriptors()
    state.sweep()
    plan = cgroups.plan()
    try:
        state.layers_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        claim = state.claim(plan)
    except OSError as error:
        raise IsolationUnavailable(f"the state folder {state.state_root()} cannot be used: {error.strerror}; set SANDMILL_STATE") from error
    descriptors = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for folder in claim.cgroups]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [theirs.fileno(), claim.folder_fd, 0 if os.geteuid() else UID_BASE, plan.version, *descriptors]
    process = subprocess.Popen(
        [str(WARDEN), *map(str, arguments)],
        executable=str(WARDEN),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={},
        close_fds=True,
        pass_fds=(theirs.fileno(), claim.folder_fd, claim.lock, *descriptors),
        start_new_session=True,
    )
    theirs.close()
    for descriptor in descriptors:
        os.close(descriptor)
    started = Node(process, ours, claim, plan)
    try:
        await started.setup()
        await started.registry.serve(claim.folder_fd)
    except BaseException:
        started.abandon()
        raise
    _node = started
    if started.lacks:
        _log.warning("%s", started.lacks)
    return started


def _allow_many_descriptors() -> None:
    """One socket per sandbox: the usual soft limit of 1024 would end at about a thousand of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave() -> None:
    """At exit: everything goes before this process does."""
    if _node is not None and _node.alive:
        home = dual.loop()
        with contextlib.suppress(TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(_abandon(_node), home).result(_LEAVE_S)


async def _abandon(which: Node) -> None:
    which.abandon()


def _forget() -> None:
    """A forked child owns no sandboxes."""
    global _node, _starting
    _node = _starting = None


def _cpu_quota(cores: float) -> int:
    """Microseconds per 100 ms; 0 (no quota) when it would not bind on this machine."""
    return 0 if cores >= _cores() else max(1000, round(cores * 100_000))


@functools.cache
def _cores() -> int:
    return os.cpu_count() or 1  # asks the kernel's files each time


atexit.register(_leave)
os.register_at_fork(after_in_child=_forget)
