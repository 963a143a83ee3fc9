"""`sandmill sandbox run|ls|stop`: a command line in; a sandboxed command's own output and exit code out."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from sandmill.cli.failures import report_failure
from sandmill.cli.told import tell
from sandmill.config.quantities import parse_duration
from sandmill.errors import ConfigError, ExecFailed, SandboxGone
from sandmill.reports.inert import inert
from sandmill.reports.words import duration, size
from sandmill.sandboxes import PIPE, Egress, Process, Sandbox, list_sandboxes, stop_sandbox
from sandmill.sandboxes.backends.choice import choose

TIMED_OUT = 124
CANNOT_RUN = 126
NOT_FOUND = 127
MAX_FILE_BYTES = 256 * 2**20
UNREAD_BYTES = 64 * 2**20
"""Output kept for a reader of ours that is slower than the command."""
_NETWORKS = ("none", "open")
_MOST_REFUSED = 20
_DNS = 53


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox that a command line asks for. `files`: contents by path, relative ones from the workdir."""

    cpu: str
    memory: str
    disk: str
    env: Mapping[str, str]
    workdir: str | None
    image: str | None
    network: Egress
    files: Mapping[str, bytes]
    user: str

    @classmethod
    def of(
        cls,
        *,
        cpu: str,
        memory: str,
        disk: str,
        env: Sequence[str],
        workdir: str | None,
        image: str | None,
        network: str | None,
        allow: Sequence[str],
        presets: Sequence[str],
        files: Sequence[str],
        user: str | None,
    ) -> Wanted:
        """From the words of a command line. Raises ConfigError naming the option."""
        variables = dict(_pair(text, "=", "--env", "NAME=VALUE") for text in env)
        copies = [_pair(text, ":", "--file", "HOST:BOX") for text in files]
        contents = {box: _contents(Path(host)) for host, box in copies}
        return cls(
            cpu=cpu,
            memory=memory,
            disk=disk,
            env=variables,
            workdir=workdir,
            image=image,
            network=_egress(network, allow, presets),
            files=contents,
            user=user or "user",
        )

    def create(self) -> Sandbox:
        """The sandbox, alive, with its files in place. Raises ConfigError, SandboxError."""
        sandbox = Sandbox.create(
            cpu=self.cpu,
            memory=self.memory,
            disk=self.disk,
            env=self.env,
            workdir=self.workdir,
            image=self.image,
            network=self.network,
        )
        try:
            if self.files:
                sandbox.write_files(self.files, user=self.user)
        except BaseException:
            sandbox.terminate()
            raise
        return sandbox


def run(
    command: Sequence[str], wanted: Wanted, *, timeout: str | None, interactive: bool, save: str | None = None, as_json: bool = False
) -> int:
    """Runs `command` to its end; returns its exit code, 128 + n for a signal, 124 for a timeout, 126 or 127 when it cannot start.

    Its files are kept as the image `save`, whatever the exit code; what a policy refused is told on stderr.
    """
    seconds = None if timeout is None else parse_duration(timeout, field="--timeout")
    with wanted.create() as sandbox:
        try:
            process = sandbox.exec(
                *command, user=wanted.user, timeout=seconds, text=False, stdin=PIPE if interactive else None, max_output=UNREAD_BYTES
            )
        except ExecFailed as error:
            said = ConfigError(f"{command[0]!r} cannot be started in the sandbox: {os.strerror(error.errno or errno.EIO)}")
            report_failure(said, debug=False, as_json=as_json)
            return NOT_FOUND if error.errno == errno.ENOENT else CANNOT_RUN
        if interactive:
            threading.Thread(target=feed, args=(process,), daemon=True).start()
        if as_json:
            process.wait()
        else:
            pump(process)
        if save is not None:
            sandbox.snapshot_filesystem(save)
        if as_json:
            return _report(sandbox, process)
        tell_refused(sandbox)
        return exit_code(process, timeout)


def _report(sandbox: Sandbox, process: Process) -> int:
    """Everything about a command that has ended, as JSON. Bytes that are no UTF-8 are lone surrogates, as Python's surrogateescape."""
    streams = {
        name: stream.read_bytes().decode("utf-8", "surrogateescape")
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
    }
    code = _code(process)
    tell(
        "",
        as_json=True,
        exit_code=code,
        signal=process.signal,
        timed_out=process.timed_out,
        truncated=process.truncated,
        duration_s=None if process.usage is None else process.usage.duration_s,
        **streams,
        refused=msgspec.to_builtins(sandbox.blocked),
    )
    return code


def list_boxes(*, as_json: bool) -> int:
    """Prints the sandboxes alive where `run` would make one, oldest first: on this machine, or on a server."""
    records = list_sandboxes(choose(None, None)[1])
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(records), ensure_ascii=True) + "\n")
        return 0
    rows = [("name", "age", "cpu", "memory", "disk", "owner", "labels")]
    for record in records:
        labels = ",".join(f"{key}={value}" for key, value in record.labels.items())
        owner = f"pid {record.owner_pid}" if record.owner_pid else "server"
        amounts = (f"{record.cpu:g}", size(record.memory_bytes), size(record.disk_bytes), owner)
        rows.append((inert(record.name, limit=60), duration(record.age_s), *amounts, inert(labels, limit=80)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    return 0


def stop(names: Sequence[str], *, every: bool, as_json: bool) -> int:
    """Stops the named sandboxes, or all; raises SandboxGone for a name that no live sandbox has, once the others are stopped."""
    if bool(names) == every:
        raise ConfigError("name the sandboxes to stop, or write --all; see sandmill sandbox ls")
    missing: SandboxGone | None = None
    _, server = choose(None, None)
    for name in [record.id for record in list_sandboxes(server)] if every else names:
        try:
            for record in stop_sandbox(name, server):
                tell(f"stopped {inert(record.name, limit=200)}", as_json=as_json, stopped=record.name, id=record.id)
        except SandboxGone as error:
            # With --all it ended by itself between the list and the stop, which is what was wanted.
            missing = missing if every else error
    if missing is not None:
        raise missing
    return 0


def feed(process: Process) -> None:
    """Copies our standard input to the command's until either ends."""
    with contextlib.suppress(OSError):
        while data := os.read(sys.stdin.fileno(), 65536):
            process.stdin.write(data)
    process.stdin.close()


def pump(process: Process) -> None:
    """Copies both streams as they come, and returns when the command has ended. Raises BrokenPipeError when our reader is gone."""
    gone: list[BaseException] = []

    def copy(source: Iterable[str | bytes], target: BinaryIO) -> None:
        try:
            for piece in source:
                target.write(piece if isinstance(piece, bytes) else piece.encode())
                target.flush()
        except OSError as error:
            gone.append(error)
            process.kill()

    streams = ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
    threads = [threading.Thread(target=copy, args=pair, daemon=True) for pair in streams]
    for thread in threads:
        thread.start()
    process.wait()
    for thread in threads:
        thread.join()
    if gone:
        raise gone[0]


def exit_code(process: Process, timeout: str | None) -> int:
    """The shell's convention for how a command ended; says what the command itself could not."""
    if process.truncated:
        sys.stderr.write("sandmill: some output was dropped because it was read too slowly\n")
    if process.timed_out:
        sys.stderr.write(f"sandmill: stopped after {inert(str(timeout))}\n")
    return _code(process)


def _code(process: Process) -> int:
    if process.timed_out:
        return TIMED_OUT
    if process.returncode is None:
        return 1
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def tell_refused(sandbox: Sandbox) -> None:
    """What the network policy refused, a line each on stderr: a command often fails without saying why."""
    for one in sandbox.blocked[:_MOST_REFUSED]:
        where = inert(one.host, limit=200) if one.port == _DNS else f"{inert(one.host, limit=200)}:{one.port}"
        sys.stderr.write(f"sandmill: refused {where}: {inert(one.reason, limit=200)}\n")


def _egress(network: str | None, allow: Sequence[str], presets: Sequence[str]) -> Egress:
    """The policy that options ask for. Raises ConfigError naming the option."""
    if network not in (None, *_NETWORKS):
        near = difflib.get_close_matches(str(network), _NETWORKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"it is none or open, not {network!r}{hint}", field="--network")
    if not allow and not presets:
        return Egress.open() if network == "open" else Egress.deny()
    option = "--allow" if allow else "--preset"
    if network is not None:
        raise ConfigError(f"hosts are allowed one by one or all at once; leave out --network {network}", field=option)
    try:
        return Egress.allow(*allow, presets=presets)
    except ConfigError as error:
        raise ConfigError(error.message, field=option) from error


def _pair(text: str, sign: str, option: str, shape: str) -> tuple[str, str]:
    first, found, second = text.partition(sign)
    if not found or not first or (sign == ":" and not second):
        raise ConfigError(f"write it as {shape}, found {text!r}", field=option)
    return first, second


def _contents(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB", field="--file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path} cannot be read: {reason}", field="--file") from None
