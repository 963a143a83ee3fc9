"""The program that runs somebody else's environment inside a sandbox. In: frames on descriptor 0. Out: frames on descriptor 1.

Standard library only: it is copied into the sandbox and runs under the package's own Python. It loads the package once; every call is
then answered by a process forked from that, as a user of its own, so that a grader which hangs, exits or breaks something is killed and the
next one finds everything as it was loaded. Descriptors 0 to 2 become the null device: nothing that a package prints can reach the frames
(frames.py). A grader's requests to the outside, where it may make any, come from its door (door.py).
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
import resource
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from sandmill.environments.packages.answers import encode, failure, plain
from sandmill.environments.packages.door import Door, refusal
from sandmill.environments.packages.frames import (
    ANSWER,
    ASK,
    CHUNK,
    END,
    FAILED,
    FIRST_UID,
    HEADER,
    LARGEST_BYTES,
    LOAD,
    ONCE,
    REPLY,
    UIDS,
    packed,
    taken,
    write_all,
)
from sandmill.environments.packages.session import Session, awaited, become_child

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_HUGE_TURN_S = 3600.0
_DYING_S = 5.0
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")


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

    def __init__(self, requests: int, replies: int, door: Door | None) -> None:
        self._requests, self._replies = requests, replies
        self._door = door
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
        if door is not None:
            self._selector.register(door.channel, selectors.EVENT_READ, ("door", 0))

    def serve(self) -> None:
        """Until descriptor 0 closes."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                what, session = key.data
                if what == "requests" and not self._take_requests():
                    return
                if what == "door":
                    self._take_asked()
                elif what != "requests" and session in self._children:
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
            data = os.read(self._requests, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._buffer += data
        while (frame := taken(self._buffer)) is not None:
            self._handle(*frame)
        return True

    def _handle(self, session: int, kind: int, deadline_ms: int, body: bytes) -> None:
        if kind == LOAD:
            self._send(session, *self._load(body))
        elif kind == END:
            self._end(session)
        elif kind == ANSWER:
            if self._door is not None:
                self._door.channel.sendall(packed(ANSWER, 0, body, deadline_ms))
        else:
            try:
                child = self._children.get(session) or self._fork(session)
            except OSError as error:
                self._send(session, FAILED, encode({"cause": "fork", "reason": f"no process could be made for it: {error.strerror}"}))
                return
            child.once = kind == ONCE
            child.deadline = time.monotonic() + deadline_ms / 1000 if deadline_ms else math.inf
            child.outgoing += packed(kind, session, body)
            self._push(session, child)

    def _take_asked(self) -> None:
        """Requests of graders go on as those of their sessions. Who has none, like another user's program, asks nothing.

        Where the adapter stays root, what runs as a session's user is no grader but what a policy wrote.
        """
        assert self._door is not None
        told_apart = self._is_root and not getattr(self._adapter, "keeps_root", False)
        for uid, number, body in self._door.asked():
            session = next((session for session, child in self._children.items() if told_apart and child.uid == uid), None)
            if session is None:
                self._door.channel.sendall(packed(ANSWER, 0, refusal(403, "only a grading may ask, as its own user"), number))
            else:
                write_all(self._replies, packed(ASK, session, body, number))

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
        who = FIRST_UID + session % UIDS if self._is_root else os.getuid()
        folder = f"{self._folder}/{session}"
        os.mkdir(folder, 0o700)
        os.chown(folder, who, -1)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self._disown()
                become_child(theirs, folder, who, keeps_root=getattr(self._adapter, "keeps_root", False))
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
        if self._door is not None:
            self._door.channel.close()
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
                del child.outgoing[: child.channel.send(child.outgoing[: CHUNK * 4])]
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
            while data := child.channel.recv(CHUNK * 4):
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
        write_all(self._replies, packed(kind, session, body))


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
    return asyncio.run(awaited(returned)) if inspect.isawaitable(returned) else returned


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
    port = os.environ.get("SANDMILL_DOOR")
    Zygote(requests, replies, Door.opened(int(port), (requests, replies)) if port else None).serve()


if __name__ == "__main__":
    main()
