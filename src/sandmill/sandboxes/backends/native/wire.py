"""The bytes of native/protocol.h, seen from Python. In: values. Out: messages, and strictly checked replies.

Whatever comes from a sandbox's agent is hostile until `parse_reply` has checked it: known operation, lengths that agree.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

INLINE_MAX: Final = 48 * 1024
MESSAGE_MAX: Final = 48 * 1024 + 512

PAYLOAD_IN_FD: Final = 1
EXEC_CAPTURE: Final = 2
EXEC_MERGE: Final = 4
EXEC_TTY: Final = 8
EXEC_HOME: Final = 16
OPEN_PARENTS: Final = 32
REMOVE_TREE: Final = 64
HURRY_ON: Final = 128
EGRESS_ALLOW: Final = 256
EGRESS_OPEN: Final = 512
CREATE_IMAGE: Final = 1024
CREATE_ON_HOST: Final = 2048
EXEC_INPUT: Final = 4096
CREATE_PROVEN: Final = 8192

SETUP, CREATE, DESTROY, HURRY = 1, 2, 3, 4
READY, EXEC, SIGNAL, KILL_TREE, KILL_ALL, PING, OPEN, WRITE, REMOVE, MKDIR, OUTPUT, EXIT, STARTED = range(1, 14)
WRITTEN, FREEZE, THAW, PART, INPUT = 14, 15, 16, 17, 18

OUTPUT_TRUNCATED: Final = 1
OUTPUT_FLOODED: Final = 2
NOT_STARTED: Final = 4

_WARDEN_REQUEST: Final = struct.Struct("=4I2Q4I")
_WARDEN_REPLY: Final = struct.Struct("=2IiIiiQQ32s")
_AGENT_REQUEST: Final = struct.Struct("=8IQ")
_AGENT_REPLY: Final = struct.Struct("=2IiI2I4Q")
_BATCH_ENTRY: Final = struct.Struct("=4I")
REPLY_BYTES: Final = _AGENT_REPLY.size
REQUEST_BYTES: Final = _AGENT_REQUEST.size


def identity(uid: int, gid: int) -> int:
    """An owner or actor as the messages carry it."""
    return uid | gid << 16


class Message(NamedTuple):
    """Bytes to send and descriptors to send along; `memfd` is to be closed after sending."""

    data: bytes
    fds: tuple[int, ...] = ()
    memfd: int = -1


class WardenReply(NamedTuple):
    """`struct warden_reply`."""

    op: int
    sequence: int
    error: int
    slot: int
    pid: int
    wait_status: int
    oom_kills: int
    cpu_us: int
    stage: str


class AgentReply(NamedTuple):
    """`struct agent_reply`; `data` are the bytes after it."""

    op: int
    id: int
    status: int
    flags: int
    out_bytes: int
    err_bytes: int
    user_us: int
    system_us: int
    max_rss_kib: int
    duration_us: int
    data: bytes

    @property
    def failure(self) -> str:
        """Of a READY with NOT_STARTED: what failed, and why."""
        return f"{self.data.decode('utf-8', 'replace')}: {os.strerror(self.status)}"


class MalformedError(ValueError):
    """A sandbox's agent sent something that no agent of ours sends."""


def warden_request(
    op: int,
    sequence: int,
    payload: bytes = b"",
    *,
    flags: int = 0,
    memory_bytes: int = 0,
    disk_bytes: int = 0,
    cpu_us: int = 0,
    processes: int = 0,
    slot: int = 0,
    who: int = 0,
    fds: tuple[int, ...] = (),
) -> Message:
    """A request to the warden."""
    placed, inline, memfd = _place(payload)
    head = _WARDEN_REQUEST.pack(op, sequence, flags | placed, len(payload), memory_bytes, disk_bytes, cpu_us, processes, slot, who)
    return Message(head + inline, fds if memfd < 0 else (*fds, memfd), memfd)


def parse_warden_reply(data: bytes) -> WardenReply:
    """The warden's answer."""
    op, sequence, error, slot, pid, status, oom_kills, cpu_us, stage = _WARDEN_REPLY.unpack(data)
    return WardenReply(op, sequence, error, slot, pid, status, oom_kills, cpu_us, stage.rstrip(b"\0").decode())


def agent_request(
    op: int,
    id: int,
    payload: bytes = b"",
    *,
    flags: int = 0,
    who: int = 0,
    first: int = 0,
    second: int = 0,
    stdin_bytes: int = 0,
    max_output: int = 0,
    fds: tuple[int, ...] = (),
) -> Message:
    """A request to a sandbox's agent."""
    placed, inline, memfd = _place(payload)
    head = _AGENT_REQUEST.pack(op, id, flags | placed, len(payload), who, first, second, stdin_bytes, max_output)
    return Message(head + inline, fds if memfd < 0 else (*fds, memfd), memfd)


def parse_reply(data: bytes) -> AgentReply:
    """A reply from inside a sandbox. Raises MalformedError unless it is exactly of the form the agent sends."""
    if len(data) < REPLY_BYTES:
        raise MalformedError(f"a reply of {len(data)} bytes")
    reply = AgentReply._make((*_AGENT_REPLY.unpack_from(data), data[REPLY_BYTES:]))
    if not READY <= reply.op <= INPUT:
        raise MalformedError(f"a reply of unknown kind {reply.op}")
    if reply.op in (OUTPUT, EXIT) and reply.out_bytes + reply.err_bytes != len(reply.data):
        raise MalformedError("a reply whose lengths disagree")
    return reply


def command_payload(cwd: bytes, argv: Iterable[bytes], env: bytes, stdin: bytes) -> bytes:
    """EXEC's payload; `env` is already joined, each variable ended by NUL."""
    return b"\0".join((cwd, *argv, env)) + stdin


def batch(files: Mapping[str, bytes], *, mode: int = stat.S_IFREG | 0o644) -> bytes:
    """Files by absolute path, as one payload."""
    return b"".join(entry(path, mode, data) for path, data in files.items())


def entry(path: str, mode: int, data: bytes = b"", *, modified: int = 0) -> bytes:
    """One file, folder or link (`data` is its target) of a batch. `mode` as in st_mode; `modified` in seconds since 1970, 0: now."""
    name = encode(path)
    if not name or b"\0" in name:
        raise OSError(errno.EINVAL, "a path may not be empty or contain NUL", path)
    return _BATCH_ENTRY.pack(mode, modified, len(name), len(data)) + name + data


def encode(text: str | bytes) -> bytes:
    """UTF-8; bytes that came out of a sandbox as surrogates go back as they were, half an emoji goes as its three bytes."""
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return text.encode("utf-8", "surrogatepass")


def _place(payload: bytes) -> tuple[int, bytes, int]:
    """Flag, inline bytes, memfd (-1: none) for a payload of any length."""
    if len(payload) <= INLINE_MAX:
        return 0, payload, -1
    memfd = os.memfd_create("sandmill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(memfd, view) :]
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(memfd)
        raise
    return PAYLOAD_IN_FD, b"", memfd
