"""One session's process from within. In: calls on the channel to its parent. Out: the adapter's answers, one after the other.

Standard library only: it is copied into the sandbox, beside the worker that forks these processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
from typing import Any

from sandmill.environments.packages.answers import Unsound, encode, failure, plain, rows, score, scores
from sandmill.environments.packages.frames import FAILED, HEADER, LARGEST_BYTES, REPLY, packed

_PR_SET_DUMPABLE, _PR_SET_PDEATHSIG = 4, 1
_MOST_PROCESSES = 64
_SHAPES = {"grade": score, "finish": score, "grade_group": scores}


class Session:
    """Serves one channel, on the main thread."""

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
            self._channel.sendall(packed(kind, session, answer))

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
                returned = self._loop.run_until_complete(awaited(returned))
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


def become_child(channel: socket.socket, folder: str, uid: int, *, keeps_root: bool) -> None:
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


async def awaited(work: Any) -> Any:
    """What an awaitable comes to."""
    return await work
