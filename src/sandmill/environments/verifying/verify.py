"""One run of somebody else's verifier. In: the agent's sandbox, its processes dead; paths to take over, tests. Out: what it wrote.

It happens in a fresh sandbox that has the task's own system and, of the agent's files, only those below `take`: no interpreter, package,
start-up file or result that an agent planted elsewhere is there. Tests and results belong to root; pytest's tests run as another user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import AsyncIterator, Mapping
from typing import Final

import msgspec

from sandmill.environments.verifying.sessions import Session, parse_sessions
from sandmill.environments.verifying.toolbox import BIN, HOME, MISSING, RECORDS, RUN, toolbox
from sandmill.errors import ConfigError, ExecFailed, GraderFailed, SandboxFileError
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images import store
from sandmill.sandboxes.process import Completed

TEST_UID: Final = 65534
"""Who tests run as: nobody, which every system has."""
SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/boot", "/proc", "/sys", "/dev", "/run")
RESERVED: Final = ("/tests", "/solution", "/logs/verifier", HOME, RUN)
NEVER: Final = (*SYSTEM, *RESERVED, "/root", "/opt", "/tmp", "/logs")
"""What `/` in a list of paths to take over leaves out."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LARGEST_RECORD_BYTES: Final = 32 << 20
_MOST_RECORDS: Final = 64
_TIDY_S: Final = 60.0
_TIDY: Final = """
find "$@" -xdev '(' -type p -o -type s ')' -exec rm -f -- {} +
find "$@" -xdev -type l -exec sh -c '
    for link; do
        case "/$(readlink "$link")/" in */proc/* | */dev/fd/*) rm -f -- "$link"; continue ;; esac
        case "$(readlink -f "$link")/" in / | RESERVED) rm -f -- "$link" ;; esac
    done' sh {} +
""".replace("RESERVED", " | ".join(f"{path}/*" for path in (*RESERVED, "/logs", "/proc")))
_GIVE: Final = f"""
find "$@" -xdev ! -user {TEST_UID} -exec chown -h {TEST_UID}:{TEST_UID} {{}} +
"""
_UV_ENV: Final = b"# Written for verifiers that install uv: it is there already.\n"


class Tests(msgspec.Struct, frozen=True, kw_only=True):
    """A verifier. `files`: absolute path -> (permissions, contents), root's. `results`: the files it may write, absolute."""

    files: Mapping[str, tuple[int, bytes]]
    command: tuple[str, ...]
    timeout_s: float
    env: Mapping[str, str] = {}
    workdir: str | None = None
    user: str = ""
    """Who runs the command; empty: root, with pytest's tests as another user."""
    results: tuple[str, ...] = ()
    largest_result_bytes: int = 64 << 10
    largest_output_bytes: int = 256 << 10
    stand_ins: bool = True
    """Whether installers and pytest are those of the toolbox; otherwise all programs are the image's own."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier left: its exit code, which proves nothing; whether it was killed at its deadline; the start of its output; result
    files that are there; pytest sessions; and what the agent had changed where nothing was taken over."""

    exit_code: int | None
    timed_out: bool
    output: bytes
    results: Mapping[str, bytes]
    sessions: tuple[Session, ...]
    outside: tuple[str, ...]


def check_take(path: str, field: str) -> str:
    """A path that may be taken over from the agent. Raises ConfigError."""
    if not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise ConfigError(f"{path[:200]!r} is no absolute path without '..'", field=field)
    for one in (*SYSTEM, *RESERVED):
        if path != "/" and (path == one or one.startswith(f"{path}/") or (one in RESERVED and path.startswith(f"{one}/"))):
            raise ConfigError(
                f"{path!r} is not the agent's to say: {one} comes from the task; name a folder below or beside it", field=field
            )
    return path


async def verify(source: Sandbox | SandboxSpec, grading: SandboxSpec, take: tuple[str, ...], tests: Tests, tools: str = "") -> Findings:
    """Runs `tests` on what `source` has below `take`; a spec stands for a sandbox in which nothing was done. `grading`: the limits of the
    fresh sandbox. `tools`: a folder of further Python packages for tests.

    Raises GraderFailed (the verifier could not be started, or needed what is not there), SandboxError.
    """
    async with _fresh(source, grading, take, tools) as (sandbox, outside):
        home = f"{RUN}/home" if any(f"{path}/".startswith("/root/") for path in take) else "/root"
        await _stage(sandbox, tests, home)
        if take and root() == "root":
            await _tidy(sandbox, take, give=tests.stand_ins and not tests.user)
        done = await _run(sandbox, tests, home)
        await sandbox.kill_processes.aio()
        missing = await _read(sandbox, MISSING, 64 << 10)
        if missing:
            names = sorted(set(missing.decode("utf-8", "replace").split("\n")) - {""})
            raise GraderFailed(
                f"the verifier could not install {', '.join(name[:80] for name in names[:5])}; put it into the task's "
                "image or into option `tools`"
            )
        results = {path: data for path in tests.results if (data := await _read(sandbox, path, tests.largest_result_bytes)) is not None}
        return Findings(
            exit_code=done.exit_code,
            timed_out=done.timed_out,
            output=done.stdout,
            results=results,
            sessions=await _sessions(sandbox),
            outside=_agents(outside, grading),
        )


@contextlib.asynccontextmanager
async def _fresh(
    source: Sandbox | SandboxSpec, grading: SandboxSpec, take: tuple[str, ...], extra: str
) -> AsyncIterator[tuple[Sandbox, tuple[str, ...]]]:
    """The grading sandbox, gone at the end; and what the agent wrote that is not in it."""
    tools = await in_thread(lambda: toolbox(store(), extra))
    if isinstance(source, SandboxSpec):
        async with await Sandbox.from_spec.aio(source, server="") as untouched:
            sandbox, outside = await untouched.fork_parts.aio(grading, take, never=NEVER, top=tools)
    else:
        sandbox, outside = await source.fork_parts.aio(grading, take, never=NEVER, top=tools)
    try:
        yield sandbox, outside
    finally:
        await sandbox.terminate.aio()


async def _stage(sandbox: Sandbox, tests: Tests, home: str) -> None:
    """Tests and empty places for results, whatever the task's image has there."""
    user = root()
    tops = dict.fromkeys(("/tests", "/logs/verifier", RUN))
    for path in tops:
        with contextlib.suppress(SandboxFileError):
            await sandbox.remove.aio(path, recursive=True, user=user)
    own = 0o777 if tests.user not in ("", "root", "0") else 0o755
    folders = {"/logs": 0o755, "/logs/verifier": own, RUN: 0o700, RECORDS: 0o700, "/tests": 0o755}
    workdir = tests.workdir or sandbox.spec.workdir
    batch = [wire.entry(path, stat.S_IFDIR | mode) for path, mode in folders.items()]
    if not await _is_there(sandbox, workdir):
        batch.append(wire.entry(workdir, stat.S_IFDIR | 0o755))
    for path, (mode, data) in tests.files.items():
        batch.append(wire.entry(path, stat.S_IFREG | mode, data))
    for name in ("uv", "uvx"):
        batch.append(wire.entry(f"{home}/.local/bin/{name}", stat.S_IFREG | 0o755, f'#!/bin/sh\nexec {BIN}/{name} "$@"\n'.encode()))
    batch.append(wire.entry(f"{home}/.local/bin/env", stat.S_IFREG | 0o644, _UV_ENV))
    await sandbox.write_batch(b"".join(batch), user)


async def _tidy(sandbox: Sandbox, take: tuple[str, ...], *, give: bool) -> None:
    """Removes from the agent's files what is none: links that lead to tests, results or other processes' views (an expected output would
    be its own answer), and pipes, on which a verifier would wait. Then gives them to the tests' user, who otherwise could not do with
    them what their owner could. A system without these tools has no Python either, and then no test runs as another user."""
    paths = [path for path in take if path != "/"]
    if "/" in take:
        barred = {one.split("/")[1] for one in NEVER}
        paths += [f"/{entry.name}" for entry in await sandbox.list.aio("/", user="root") if entry.name not in barred]
    script = _TIDY + (_GIVE if give else "")
    try:
        done = await sandbox.run.aio("/bin/sh", "-c", script, "sh", *paths, env={"PATH": PATH}, user="root", timeout=_TIDY_S)
    except ExecFailed:
        return
    if done.timed_out:
        raise GraderFailed(f"the agent's files could not be made ready within {_TIDY_S:g} s")


async def _run(sandbox: Sandbox, tests: Tests, home: str) -> Completed:
    own = sandbox.spec.env.get("PATH", PATH)
    env = {
        "PATH": f"{BIN}:{own}" if tests.stand_ins else own,
        "DEBIAN_FRONTEND": "noninteractive",
        "SANDMILL_TEST_UID": str(TEST_UID),
        "HOME": home,
        **tests.env,
    }
    try:
        return await sandbox.run.aio(
            *tests.command,
            env=env,
            workdir=tests.workdir,
            user=tests.user or root(),
            timeout=tests.timeout_s,
            max_output=tests.largest_output_bytes,
            merge_stderr=True,
        )
    except ExecFailed as error:
        raise GraderFailed(f"the verifier {tests.command[0]!r} could not be started: {os.strerror(error.errno or errno.EIO)}") from error


async def _read(sandbox: Sandbox, path: str, max_bytes: int) -> bytes | None:
    """A plain file that is there itself, no link to one. Raises GraderFailed when it is something else or too long."""
    user = root()
    try:
        entries = await sandbox.list.aio(posixpath.dirname(path), user=user)
    except SandboxFileError:
        return None
    entry = next((one for one in entries if one.name == posixpath.basename(path)), None)
    if entry is None:
        return None
    if entry.kind != "file":
        raise GraderFailed(f"{path} is a {entry.kind}, not a file that the verifier wrote")
    try:
        return await sandbox.read.aio(path, user=user, max_bytes=max_bytes)
    except SandboxFileError as error:
        raise GraderFailed(f"{path} cannot be read: {error}") from error


async def _sessions(sandbox: Sandbox) -> tuple[Session, ...]:
    try:
        entries = await sandbox.list.aio(RECORDS, user=root())
    except SandboxFileError:
        return ()
    records = [await _read(sandbox, f"{RECORDS}/{one.name}", LARGEST_RECORD_BYTES) for one in entries[:_MOST_RECORDS]]
    return tuple(session for record in records if record is not None for session in parse_sessions(record))


async def _is_there(sandbox: Sandbox, folder: str) -> bool:
    try:
        await sandbox.list.aio(folder, user=root())
    except SandboxFileError:
        return False
    return True


def _agents(outside: tuple[str, ...], grading: SandboxSpec) -> tuple[str, ...]:
    """Without what comes with every sandbox."""
    return tuple(
        path for path in outside if path not in ("/etc", "/home", "/home/user", "/workspace", "/tmp", "/root") and path != grading.workdir
    )


def root() -> str:
    """Who is root in a sandbox; without root outside there is one user."""
    return "user" if os.geteuid() else "root"


__all__ = ["Findings", "Tests", "check_take", "root", "verify"]
