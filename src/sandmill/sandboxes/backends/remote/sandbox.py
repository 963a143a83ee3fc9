"""A sandbox on a server, as the same `Sandbox` as one of this machine. In: a spec and a server's URL. Out: the same methods, over the wire.

What is known of its end is what the last answer said: `alive` does not ask. Its idle time, lifetime and cap are watched by the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import posixpath
from collections.abc import Mapping
from typing import IO, Any, Final

import msgspec

from sandmill.errors import ConfigError, SandboxCreateFailed, SandboxError, SandboxFileError, SandboxGone
from sandmill.sandboxes.backends.remote.client import AnswerError, Client, client_of, object_of
from sandmill.sandboxes.backends.remote.http import Answer
from sandmill.sandboxes.backends.remote.preserving import OVER, RemotePreserving, name_note
from sandmill.sandboxes.backends.remote.process import RemoteProcess, not_started
from sandmill.sandboxes.backends.remote.wiring import creation, entry, user_word, words
from sandmill.sandboxes.commanding import Invocation
from sandmill.sandboxes.dual import dual
from sandmill.sandboxes.files import FileEntry, contents, open_flags
from sandmill.sandboxes.process import Completed, Process
from sandmill.sandboxes.registry import SandboxRecord
from sandmill.sandboxes.spec import SandboxSpec, check_env

_WRITES_AT_ONCE: Final = 8
_JSON: Final = {"Accept": "application/json"}
_BYTES: Final = {"Accept": "application/octet-stream"}


class RemoteSandbox(RemotePreserving):
    """A sandbox on a server."""

    def __init__(self, spec: SandboxSpec, client: Client, value: Mapping[str, Any], name: str | None, labels: Mapping[str, str]) -> None:
        self.id = str(value["metadata"]["name"])
        self.name = name or self.id
        self.labels = labels
        self.spec = spec
        self._client = client
        self._gone = None
        self._born = asyncio.get_running_loop().time()

    @property
    def lacks(self) -> str | None:
        """Unknown from here: the server's own `sandmill doctor` says."""
        return None

    async def _start(self, command: Invocation) -> Process:
        stdin, tty = command.stdin is not None, command.tty
        spec: dict[str, Any] = {"command": words(command.argv), "tty": tty, "stdin": stdin, "user": user_word(command.user)}
        for name, value in (command.env or {}).items():
            check_env(name, value)
            spec.setdefault("env", []).append({"name": name, "value": value})
        if command.workdir is not None:
            spec["workingDir"] = posixpath.join(self.spec.workdir, command.workdir)
        if command.timeout_s is not None:
            spec["timeout"] = f"{max(1, round(command.timeout_s * 1000))}ms"
        made = object_of(await self._ask("POST", f"sandboxes/{self.id}/processes", json={"spec": spec}))
        if (error := not_started(made["status"], command.argv[0])) is not None:
            raise error
        process = RemoteProcess(self._client, self.name, made, text=command.text, max_output=command.max_output, stdin=stdin, tty=tty)
        process.program = command.argv[0]
        if (feed := command.fed) is not None:
            asyncio.get_running_loop().create_task(process.feed(feed))
        return process

    async def _complete(self, command: Invocation, *, merge_stderr: bool) -> Completed:
        """With `merge_stderr` both streams come in the order the server got them."""
        merged = ("sh", "-c", 'exec "$@" 2>&1', "sh", *command.argv) if merge_stderr else command.argv
        process = await self._start(command._replace(argv=merged, stdin=command.stdin or None))
        gone: str | None = None
        try:
            await process.wait.aio()
        except SandboxGone as error:
            gone = error.reason
        except asyncio.CancelledError:
            await asyncio.shield(process.kill.aio())
            raise
        code = process.returncode
        return Completed(
            exit_code=code if code is not None and code >= 0 and not process.timed_out else None,
            signal=9 if process.timed_out else process.signal,
            stdout=await process.stdout.read_bytes.aio(),
            stderr=await process.stderr.read_bytes.aio(),
            truncated=process.truncated,
            timed_out=process.timed_out,
            duration_s=0.0 if process.usage is None else process.usage.duration_s,
            gone=gone,
        )

    @dual
    async def open(self, path: str, mode: str = "r", *, user: str = "user", encoding: str = "utf-8") -> IO[Any]:
        """A file of the sandbox as a Python file: read at once when opened, written at once when closed."""
        _, binary = open_flags(mode)
        kept = b""
        if "r" in mode or "a" in mode:
            try:
                kept = await self.read.aio(path, user=user)
            except SandboxFileError as error:
                if "r" in mode or error.errno != errno.ENOENT:
                    raise
        elif "x" in mode and await self._exists(path, user):
            raise SandboxFileError(errno.EEXIST, "in the sandbox: File exists", path)
        writes = "r" not in mode or "+" in mode
        file = _Held(self, path, user, kept, writes=writes)
        if "a" in mode:
            file.seek(0, io.SEEK_END)
        return file if binary else io.TextIOWrapper(file, encoding=encoding, errors="replace", write_through=True)

    @dual
    async def read(self, path: str, *, user: str = "user", max_bytes: int | None = None) -> bytes:
        """As on this machine; the server hands out 64 MiB at most."""
        data = (await self._file("GET", path, {"user": user}, headers=_BYTES)).body
        if max_bytes is not None and len(data) > max_bytes:
            raise SandboxFileError(errno.EFBIG, f"{path} is longer than {max_bytes} bytes")
        return data

    @dual
    async def write(self, path: str, data: bytes | str, *, user: str = "user") -> None:
        """As on this machine."""
        await self._file("PUT", path, {"user": user}, data=contents(data, path))

    @dual
    async def write_files(self, files: Mapping[str, bytes | str], *, user: str = "user") -> None:
        """As on this machine, a few files at a time."""
        room = asyncio.Semaphore(_WRITES_AT_ONCE)

        async def one(path: str, data: bytes | str) -> None:
            async with room:
                await self.write.aio(path, data, user=user)

        await asyncio.gather(*(one(path, data) for path, data in files.items()))

    @dual
    async def list(self, path: str = ".", *, user: str = "user") -> list[FileEntry]:
        """As on this machine."""
        items = object_of(await self._file("GET", path, {"user": user}, headers=_JSON))["items"]
        return [entry(item) for item in items]

    @dual
    async def mkdir(self, path: str, *, user: str = "user") -> None:
        """As on this machine."""
        await self._file("PUT", path, {"user": user, "folder": "true"}, data=b"")

    @dual
    async def remove(self, path: str, *, recursive: bool = False, user: str = "user") -> None:
        """As on this machine."""
        await self._file("DELETE", path, {"user": user, "recursive": "true" if recursive else "false"})

    @dual
    async def kill_processes(self) -> None:
        """As on this machine."""
        await self._ask("DELETE", f"sandboxes/{self.id}/processes")

    @dual
    async def ping(self) -> None:
        """Asks the server whether the sandbox is up. Raises SandboxGone."""
        status = object_of(await self._ask("GET", f"sandboxes/{self.id}"))["status"]
        if status["phase"] not in ("Pending", "Starting", "Running"):
            raise self._over(status.get("message", f"it is {status['phase']}"))

    async def stop(self, reason: str, *, gently: bool = False) -> None:
        """Ends it. On the sandbox loop. Idempotent."""
        await self.list_blocked.aio()
        with contextlib.suppress(AnswerError, ConnectionError):
            await self._client.ask("DELETE", f"sandboxes/{self.id}")
        self._over(reason)

    def hand_out(self, name: str | None, labels: Mapping[str, str] | None) -> None:
        """Leaves its pool. Its lifetime began when it was made."""
        self.name, self.labels = name or self.id, dict(labels or {})

    def record(self) -> SandboxRecord:
        """How it is listed."""
        return SandboxRecord(
            id=self.id,
            name=self.name,
            labels=self.labels,
            owner_pid=0,
            age_s=asyncio.get_running_loop().time() - self._born,
            cpu=self.spec.cpu,
            memory_bytes=self.spec.memory_bytes,
            disk_bytes=self.spec.disk_bytes,
            workdir=self.spec.workdir,
        )

    def _over(self, reason: str) -> SandboxGone:
        self._gone = self._gone or SandboxGone(self.name, reason)
        return self._gone

    def _twin(self, value: Mapping[str, Any], name: str | None) -> RemoteSandbox:
        twin = RemoteSandbox(self.spec, self._client, value, name, self.labels)
        twin._image = self._image
        return twin

    async def answers(self, *, written: bool = False) -> None:
        """Its creation has succeeded only when it answers, which it has when files were `written`. Raises SandboxError."""
        if not written:
            await self._file("GET", ".", {}, headers=_JSON)
        if self.spec.image is not None:
            await self._learn_image()

    async def _exists(self, path: str, user: str) -> bool:
        try:
            await self.read.aio(path, user=user)
        except SandboxFileError as error:
            return error.errno != errno.ENOENT
        return True

    async def _ask(self, method: str, path: str, **options: Any) -> Answer:
        if self._gone is not None:
            raise SandboxGone(self._gone.sandbox, self._gone.reason)
        try:
            return await self._client.ask(method, path, **options)
        except ConnectionError as error:
            raise SandboxGone(self.name, str(error)) from error
        except AnswerError as error:
            if any(cause.get("field") == "path" for cause in error.causes):
                raise
            if error.reason in ("Invalid", "BadRequest"):
                raise ConfigError(error.message, field=next((str(cause["field"]) for cause in error.causes), None)) from error
            if error.reason in OVER:
                self._over(error.message)
            raise error.of_sandbox(self.name) from error

    async def _file(self, method: str, path: str, query: Mapping[str, str], **options: Any) -> Answer:
        where = posixpath.join(self.spec.workdir, path)
        if "\0" in where:
            raise SandboxFileError(errno.EINVAL, "a path may not contain NUL", path)
        try:
            return await self._ask(method, f"sandboxes/{self.id}/files", query={"path": where, **query}, **options)
        except AnswerError as error:
            raise error.of_file(path) from error


class _Held(io.BytesIO):
    """A file's contents; written back when closed."""

    def __init__(self, sandbox: RemoteSandbox, path: str, user: str, kept: bytes, *, writes: bool) -> None:
        super().__init__(kept)
        self._sandbox = sandbox
        self._path = path
        self._user = user
        self._writes = writes

    def writable(self) -> bool:
        return self._writes

    def close(self) -> None:
        if not self.closed and self._writes:
            data = self.getvalue()
            super().close()
            self._sandbox.write(self._path, data, user=self._user)
        super().close()


async def create_remote(
    url: str, spec: SandboxSpec, files: Mapping[str, bytes | str] | None, name: str | None, labels: Mapping[str, str] | None
) -> RemoteSandbox:
    """A sandbox on the server at `url`. Raises ConfigError, IsolationUnavailable, SandboxCreateFailed."""
    if spec.price_microusd_per_hour is not None:
        raise ConfigError("the server's own price book says what an hour costs; leave it out", field="price_per_hour")
    client = client_of(url)
    try:
        value = await client.create({"metadata": {"generateName": "sb-", "annotations": name_note(name)}, "spec": creation(spec)})
    except AnswerError as error:
        raise error.of_creation() from error
    except ConnectionError as error:
        raise SandboxCreateFailed(f"{error}; start it (`sandmill serve`), or unset SANDMILL_API_URL to use this machine") from error
    spec = msgspec.structs.replace(spec, workdir=str(value["spec"]["workingDir"]))
    sandbox = RemoteSandbox(spec, client, value, name, dict(labels or {}))
    try:
        await sandbox.write_files.aio(files or {})
        await sandbox.answers(written=bool(files))
    except BaseException as error:
        await asyncio.shield(sandbox.stop("creation failed"))
        if isinstance(error, SandboxGone):
            raise AnswerError(409, {"message": error.reason}).of_creation() from error
        raise
    return sandbox


__all__ = ["RemoteSandbox", "SandboxError", "create_remote"]
