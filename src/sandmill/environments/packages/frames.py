"""The frames between a package's worker and us, on both sides. Standard library only: it is copied into the sandbox.

A frame: HEADER (bytes of the body, session, kind, deadline in ms or 0), then the body, JSON. To the worker: LOAD once; CALL, answered by
the session's process, which is made for the first; ONCE, the same and the process ends with the answer; END, which ends a session. From
it: REPLY with what the adapter came to, or FAILED with the reason why there is none.

ASK is a grader's HTTP request on its way out, ANSWER what comes of it: a line of JSON and the bytes of a body. Their last field is the
number of the request; the first hop of an ASK has the asking user for its session.
"""

from __future__ import annotations

import os
import struct

HEADER = struct.Struct(">IIBI")
LOAD, CALL, ONCE, END = 1, 2, 3, 4
REPLY, FAILED = 11, 12
ASK, ANSWER = 21, 22
LARGEST_BYTES = 64 << 20
CHUNK = 1 << 16
FIRST_UID, UIDS = 20_000, 20_000
"""Users of sessions, each of which is one of its own while it lives."""


def packed(kind: int, session: int, body: bytes, last: int = 0) -> bytes:
    """One frame."""
    return HEADER.pack(len(body), session, kind, last) + body


def taken(buffer: bytearray) -> tuple[int, int, int, bytes] | None:
    """The first whole frame of a buffer, without it from now on: session, kind, last field, body. None: there is none yet."""
    if len(buffer) < HEADER.size:
        return None
    size, session, kind, last = HEADER.unpack_from(buffer)
    if len(buffer) < HEADER.size + size:
        return None
    body = bytes(buffer[HEADER.size : HEADER.size + size])
    del buffer[: HEADER.size + size]
    return session, kind, last, body


def write_all(descriptor: int, data: bytes) -> None:
    """Waits until all of it is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
