"""The program that runs somebody else's environment inside a sandbox. In: frames on descriptor 0. Out: frames on descriptor 1.

Standard library only: it is copied into the sandbox and runs under the package's own Python. It loads the package once; every call is
then answered by a process forked from that, as a user of its own, so that a grader which hangs, exits or breaks something is killed and the
next one finds everything as it was loaded. Descriptors 0 to 2 become the null device: nothing that a package prints can reach the frames.

A frame: HEADER (bytes of the body, session, kind, deadline in ms or 0), then the body, JSON. To here: LOAD once; CALL, answered by the
session's process, which is made for the first; ONCE, the same and the process ends with the answer; END, which ends a session. From
here: REPLY with what the adapter came to, or FAILED with the reason why there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import inspect
import json
import math
import os
import random
import resource
import select
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

from sandmill.environments.packages.answers import Unsound, encode, failure, plain, rows, score, scores

HEADER = struct.Struct(">IIBI")
LOAD, CALL, ONCE, END = 1, 2, 3, 4
REPLY, FAILED = 11, 12
LARGEST_BYTES = 64 << 20
_CHUNK = 1 << 16
_PR_SET_DUMPABLE, _PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 4, 1, 36
_HUGE_TURN_S = 3600.0
_DYING_S = 5.0
_FIRST_UID, _UIDS = 20_000, 20_000
_MOST_PROCESSES = 64
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")
_SHAPES = {"grade": score, "finish": score, "grade_group": scores}


class Child:
    """One session's process, as its parent sees it."""

    def __init__(self, pid: int, channel: socket.socket, folder: str, uid: int) -> None:
        self.pid = pid
        self.uid = uid
        self.pidfd = os.pidfd_open(pid)
        self.channel = channel
        self.folder = folder
        self.outgoing = bytearray()
        self.incoming = bytearray()
        self.deadline = math.inf
        self.once = False
        self.closed = False


class Zygote:
    """Holds the loaded package, forks, passes frames on, and keeps deadlines. Runs no call itself."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._buffer = bytearray()
        self._adapter: Any = None
        self._is_root = os.geteuid() == 0
        self._folder = tempfile.mkdtemp(prefix=".calls-")
        os.chmod(self._folder, 0o711)
        self._children: dict[int, Child] = {}
        self._kept: set[int] = set()
        self._selector = selectors.DefaultSelector()
        os.set_blocking(requests, False)
        self._selector.register(requests, selectors.EVENT_READ, ("requests", 0))

    def serve(self) -> None:
        """Until descriptor 0 closes."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                what, session = key.data
                if what == "requests" and not self._take_requests():
                    return
                if what != "requests" and session in self._children:
                    self._attend(session, what)
            now = time.monotonic()
            for session, child in [pair for pair in self._children.items() if pair[1].deadline <= now]:
                if child.closed:
                    self._fail(session, "exit", "its process closed its end before it answered")
                else:
                    self._fail(session, "deadline", "it took longer than its deadline")

    def _patience(self) -> float:
        nearest = min((child.deadline for child in self._children.values()), default=math.inf)
        return min(max(0.0, nearest - time.monotonic()), _HUGE_TURN_S)

    def _take_requests(self) -> bool:
        try:
            data = os.read(self._requests, _CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, session, kind, deadline_ms = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + size:
                break
            body = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            self._handle(session, kind, deadline_ms, body)
        return True

    def _handle(self, session: int, kind: int, deadline_ms: int, body: bytes) -> None:
        if kind == LOAD:
            self._send(session, *self._load(body))
        elif kind == END:
            self._end(session)
        else:
            try:
                child = self._children.get(session) or self._fork(session)
            except OSError as error:
                self._send(session, FAILED, encode({"cause": "fork", "reason": f"no process could be made for it: {error.strerror}"}))
                return
            child.once = kind == ONCE
            child.deadline = time.monotonic() + deadline_ms / 1000 if deadline_ms else math.inf
            child.outgoing += HEADER.pack(len(body), session, kind, 0) + body
            self._push(session, child)

    def _load(self, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        try:
            self._adapter = load(asked)
            described = plain(answered(self._adapter.describe()), "the description")
            answer = REPLY, encode({**described, "modules": _modules()})
        except BaseException as error:  # noqa: BLE001 - the reason goes to whoever asked
            return FAILED, failure("load", error)
        self._kept = _own_children()
        gc.collect()
        gc.freeze()
        return answer

    def _fork(self, session: int) -> Child:
        ours, theirs = socket.socketpair()
        who = _FIRST_UID + session % _UIDS if self._is_root else os.getuid()
        folder = f"{self._folder}/{session}"
        os.mkdir(folder, 0o700)
        os.chown(folder, who, -1)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self._disown()
                _become_child(theirs, folder, who, keeps_root=getattr(self._adapter, "keeps_root", False))
                Session(self._adapter, theirs).serve()
            finally:
                os._exit(0)
        theirs.close()
        ours.setblocking(False)
        self._children[session] = child = Child(pid, ours, folder, who)
        self._selector.register(ours, selectors.EVENT_READ, ("channel", session))
        self._selector.register(child.pidfd, selectors.EVENT_READ, ("death", session))
        return child

    def _disown(self) -> None:
        """In a new session's process: the ends of other conversations are not its own."""
        self._selector.close()
        os.close(self._requests)
        os.close(self._replies)
        for child in self._children.values():
            child.channel.close()
            os.close(child.pidfd)

    def _attend(self, session: int, what: str) -> None:
        child = self._children[session]
        if child.outgoing:
            self._push(session, child)
        done = self._pull(session, child)
        if what == "death" and not done and session in self._children:
            info = None
            with contextlib.suppress(ChildProcessError):  # the package said that it does not care for its children
                info = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            status = 0 if info is None else info.si_status
            ended = f"exit code {status}" if info is None or info.si_code == os.CLD_EXITED else f"signal {status}"
            self._fail(session, "exit", f"its process ended ({ended}) before it answered")

    def _push(self, session: int, child: Child) -> None:
        """Sends as much of a request as the process takes now."""
        if child.closed:
            return
        try:
            while child.outgoing:
                del child.outgoing[: child.channel.send(child.outgoing[: _CHUNK * 4])]
        except BlockingIOError:
            pass
        except OSError:
            child.outgoing.clear()  # it is dead, or closed its end: its death or deadline says so
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.outgoing else 0)
        self._selector.modify(child.channel, events, ("channel", session))

    def _pull(self, session: int, child: Child) -> bool:
        """Whether the session is over."""
        if child.closed:
            return False
        try:
            while data := child.channel.recv(_CHUNK * 4):
                child.incoming += data
                if len(child.incoming) >= HEADER.size:
                    size, _, kind, _ = HEADER.unpack_from(child.incoming)
                    if size > LARGEST_BYTES:
                        self._fail(session, "size", f"its answer claims {size} bytes and may have {LARGEST_BYTES}")
                        return True
                    if len(child.incoming) >= HEADER.size + size:
                        return self._pass_on(session, child, kind, size)
        except OSError:  # nothing there yet, or it died: then its pidfd says so
            return False
        self._closed(child)
        return False

    def _closed(self, child: Child) -> None:
        """The process closed its end of the channel: if it is not about to die, it will never answer."""
        child.closed = True
        child.outgoing.clear()
        self._selector.unregister(child.channel)
        child.deadline = min(child.deadline, time.monotonic() + _DYING_S)

    def _pass_on(self, session: int, child: Child, kind: int, size: int) -> bool:
        body = bytes(child.incoming[HEADER.size : HEADER.size + size])
        child.incoming.clear()
        child.deadline = math.inf
        once = child.once
        if once:
            self._end(session)
        self._send(session, FAILED if kind == FAILED else REPLY, body)
        return once

    def _fail(self, session: int, cause: str, reason: str) -> None:
        self._end(session)
        self._send(session, FAILED, encode({"cause": cause, "reason": reason}))

    def _end(self, session: int) -> None:
        """Kills a session's process and everything that it started."""
        child = self._children.pop(session, None)
        if child is None:
            return
        if not child.closed:
            self._selector.unregister(child.channel)
        self._selector.unregister(child.pidfd)
        child.channel.close()
        _kill(child.pid)
        select.select([child.pidfd], [], [], 5.0)
        os.close(child.pidfd)
        self._sweep()
        shutil.rmtree(child.folder, ignore_errors=True)
        if self._is_root:
            _remove_owned(child.uid)

    def _sweep(self) -> None:
        """Orphans come to this process: what belongs to no session is killed and reaped."""
        patience = time.monotonic() + 5.0
        while strays := _own_children() - self._kept - {child.pid for child in self._children.values()}:
            for pid in strays:
                _kill(pid)
                _reap(pid)
            if time.monotonic() > patience:
                return
            time.sleep(0.001)

    def _send(self, session: int, kind: int, body: bytes) -> None:
        _write_all(self._replies, HEADER.pack(len(body), session, kind, 0) + body)


class Session:
    """One session's process from within: requests in, the adapter's answers out, one after the other, on the main thread."""

    def __init__(self, adapter: Any, channel: socket.socket) -> None:
        self._adapter = adapter
        self._channel = channel
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def serve(self) -> None:
        """Until the other end closes."""
        while (header := self._read(HEADER.size)) is not None:
            size, session, _, _ = HEADER.unpack(header)
            body = self._read(size)
            if body is None:
                return
            kind, answer = self._answer(body)
            if len(answer) > LARGEST_BYTES:
                kind, answer = (
                    FAILED,
                    encode({"cause": "size", "reason": f"its answer has {len(answer)} bytes and may have {LARGEST_BYTES}"}),
                )
            self._channel.sendall(HEADER.pack(len(answer), session, kind, 0) + answer)

    def _answer(self, body: bytes) -> tuple[int, bytes]:
        try:
            request = json.loads(body)
            if request.get("seed") is not None:
                _seed(request["seed"])
            method = getattr(self._adapter, request["method"], None)
            if method is None:
                raise Unsound(f"this format has no {request['method']}")
            returned = method(**request["params"])
            if inspect.isawaitable(returned):  # one loop for the whole session: what a package keeps may belong to it
                returned = self._loop.run_until_complete(_awaited(returned))
            if request["method"] == "tasks":
                return REPLY, encode(rows(returned, request["params"]["split"], request["params"]["start"]))
            return REPLY, encode(_SHAPES.get(request["method"], plain)(returned, "the answer"))
        except BaseException as error:  # noqa: BLE001 - the reason goes to whoever asked
            return FAILED, failure("raised", error)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            more = self._channel.recv(min(size - len(data), 1 << 20))
            if not more:
                return None
            data += more
        return bytes(data)


def _seed(seed: int) -> None:
    """Generators of the whole process: some games draw from nothing else."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _modules() -> list[str]:
    """Files of everything imported so far."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({file for file in files if isinstance(file, str)})


def load(asked: dict[str, Any]) -> Any:
    """The adapter, with the package behind it loaded: what its `load(options)` returns."""
    spec = importlib.util.spec_from_file_location("sandmill_adapter", asked["adapter"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sandmill_adapter"] = module
    spec.loader.exec_module(module)
    return answered(module.load(asked["options"]))


def answered(returned: Any) -> Any:
    """The result of a coroutine, or the thing itself."""
    return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(work: Any) -> Any:
    return await work


def _become_child(channel: socket.socket, folder: str, uid: int, *, keeps_root: bool) -> None:
    """In a new session's process: a user, a group and a folder of its own, killed first when memory runs out, one channel and no other.

    `keeps_root`: for an adapter that runs what a policy wrote in processes of that user, and nothing of it in its own.
    """
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 1)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    os.environ["SANDMILL_UID"] = str(uid)
    if os.geteuid() == 0 and not keeps_root:
        resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_PROCESSES, _MOST_PROCESSES))
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_DUMPABLE, 0)  # nobody of the same user takes its memory or its channel
    os.register_at_fork(after_in_child=channel.close)  # what a grader forks cannot answer in its name
    os.chdir(folder)
    os.environ["TMPDIR"] = os.environ["HOME"] = folder


def _own_children() -> set[int]:
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                found |= {int(pid) for pid in file.read().split()}
        except OSError:  # the thread has ended
            continue
    return found


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _remove_owned(uid: int) -> None:
    """What a session left where everybody may write."""
    for place in _SHARED:
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.stat(follow_symlinks=False).st_uid != uid:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    """Serves whoever holds the other ends of descriptors 0 and 1."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        os.environ.pop(name, None)
    Zygote(requests, replies).serve()


if __name__ == "__main__":
    main()
