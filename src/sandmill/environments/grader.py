"""The main program of a grading process: frames on standard input in, frames on standard output out (see `isolation`).

The grader's own prints cannot reach the pipe, its exceptions come back as reasons, and the process ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from typing import BinaryIO, TypeVar

import msgspec

from sandmill.environments import registry
from sandmill.environments.environment import Environment
from sandmill.environments.isolation import HEADER, GradeCall, Hello, Reply
from sandmill.environments.verdicts import reason_of, sound_verdict
from sandmill.errors import GraderFailed

M = TypeVar("M", Hello, GradeCall)
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serves one parent until its pipe closes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, replies = _private_pipes()
    hello = _read(requests, Hello)
    if hello is None:
        return 0
    sys.path[:] = hello.path
    try:
        environment = registry.load(hello.reference, hello.section)
        _write(replies, Reply(digest=environment.digest))
    except Exception as error:  # noqa: BLE001 - the parent turns the reason into a GraderFailed
        _write(replies, Reply(failure=reason_of(error)))
        return 1
    with asyncio.Runner() as runner:
        while (call := _read(requests, GradeCall)) is not None:
            _write(replies, _graded(runner, environment, call))
    return 0


def _graded(runner: asyncio.Runner, environment: Environment, call: GradeCall) -> Reply:
    try:
        return Reply(verdict=sound_verdict(runner.run(environment.grade(call.task, call.submission, call.artifacts))))
    except GraderFailed as error:
        return Reply(failure=str(error))
    except SystemExit as error:
        return Reply(failure=f"the grader called exit({error.code!a})")
    except Exception as error:  # noqa: BLE001 - the parent turns the reason into a GraderFailed
        return Reply(failure=reason_of(error))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes on descriptors of our own; descriptors 0 and 1 become the null device, for whatever the grader reads or prints."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def _read(stream: BinaryIO, kind: type[M]) -> M | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body = stream.read(HEADER.unpack(header)[0])
    return msgspec.msgpack.decode(body, type=kind)


def _write(stream: BinaryIO, reply: Reply) -> None:
    body = msgspec.msgpack.encode(reply)
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
