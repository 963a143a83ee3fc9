"""A command on a server, as the same `Process` as one of this machine. In: a Process object. Out: its output as it comes, its end."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import json
import signal as signals
from collections.abc import Mapping
from typing import Any, Final

from sandmill.errors import ConfigError, ExecFailed, SandboxError, SandboxGone
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.remote.client import AnswerError, Client
from sandmill.sandboxes.dual import dual
from sandmill.sandboxes.process import Process, Usage, exec_failed
from sandmill.sandboxes.streams import Input, Output

_POLL: Final = "30s"
_PIECE: Final = 1 << 19
_PAUSE_S: Final = 0.05
ENDED: Final = ("Succeeded", "Failed", "Cancelled")


class RemoteOutput(Output):
    """An output stream that is fed from the wire."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int, text: bool, *, open: bool) -> None:
        super().__init__(loop, -1, limit, text)
        if open:
            self.closed.clear()


class RemoteInput(Input):
    """Standard input that goes over the wire, piece by numbered piece."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client, name: str, *, open: bool, sent: int = 0) -> None:
        super().__init__(loop, -1)
        self._client = client
        self._name = name
        self._open = open
        self._number = sent
        self._closing: asyncio.Task[None] | None = None

    @dual
    async def write(self, data: str | bytes) -> None:
        """Writes all of `data`. Raises BrokenPipeError when the command no longer reads."""
        whole = wire.encode(data)
        async with self._turn:
            for start in range(0, len(whole), _PIECE):
                await self._send({"data": base64.b64encode(whole[start : start + _PIECE]).decode()})

    @dual
    async def close(self) -> None:
        """The command sees end of file. Idempotent."""
        async with self._turn:
            if self._open:
                with contextlib.suppress(BrokenPipeError):
                    await self._send({"eof": True})
                self._open = False

    def shut(self) -> None:
        """`close` for the loop's own thread."""
        if self._open and self._closing is None:
            self._closing = self._loop.create_task(self.close.aio())

    def end(self) -> None:
        """The command has ended."""
        self._open = False

    async def _send(self, piece: dict[str, Any]) -> None:
        if not self._open:
            raise BrokenPipeError("the command's standard input is closed")
        self._number += 1
        while True:
            try:
                await self._client.ask("POST", f"processes/{self._name}/stdin", json={"seq": self._number, **piece})
            except AnswerError as error:
                if error.reason != "StdinBackpressure":
                    self._open = False
                    raise BrokenPipeError(f"the command takes no more input: {error.message}") from error
                await asyncio.sleep(_PAUSE_S)
            except ConnectionError as error:
                raise BrokenPipeError(str(error)) from error
            else:
                return


class RemoteProcess(Process):
    """A command that runs on a server. `skip`: bytes of each stream and `sent`: pieces of input that an earlier client of it has had."""

    def __init__(
        self,
        client: Client,
        box: str,
        value: dict[str, Any],
        *,
        text: bool,
        max_output: int,
        stdin: bool,
        tty: bool,
        skip: Mapping[str, int] | None = None,
        sent: int = 0,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._client = client
        self._box = box
        self._name: str = value["metadata"]["name"]
        self._skip = dict(skip or {})
        self._loop = loop
        self._exited = loop.create_future()
        self._exited.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.id = int(value["spec"]["sequence"])
        self.returncode = None
        self.usage = None
        self.timed_out = False
        self.stdout = RemoteOutput(loop, max_output, text, open=True)
        self.stderr = RemoteOutput(loop, max_output, text, open=not tty)
        self.stdin = RemoteInput(loop, client, self._name, open=stdin or tty, sent=sent)
        self._reader = loop.create_task(self._read())

    @property
    def name(self) -> str:
        """Of its object on the server."""
        return self._name

    @dual
    async def send_signal(self, number: int) -> None:
        """Sends a signal to the command's process group."""
        if self.returncode is None:
            with contextlib.suppress(AnswerError):
                await self._client.ask("POST", f"processes/{self._name}/signals", json={"signal": signals.Signals(number).name})

    @dual
    async def resize(self, rows: int, columns: int) -> None:
        """Tells a command started with `tty=True` its terminal's size; without a terminal, nothing happens."""
        with contextlib.suppress(AnswerError):
            await self._client.ask("POST", f"processes/{self._name}/signals", json={"resize": {"rows": rows, "cols": columns}})

    async def _kill(self) -> None:
        if self.returncode is None:
            headers = {"Content-Type": "application/merge-patch+json"}
            with contextlib.suppress(AnswerError):
                await self._client.ask("PATCH", f"processes/{self._name}", data=b'{"spec":{"state":"Cancelled"}}', headers=headers)
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self._exited)

    async def _read(self) -> None:
        """Takes output until the process is done, then its end."""
        try:
            after, status = 0, None
            while status is None:
                query = {"after": str(after), "wait": _POLL}
                answer = await self._client.ask("GET", f"processes/{self._name}/output", query=query)
                for line in answer.body.splitlines():
                    frame = json.loads(line)
                    status = frame["status"] if frame.get("done") else status
                    if "data" in frame:
                        data = base64.b64decode(frame["data"])
                        after = int(frame["offset"]) + len(data)
                        (self.stderr if frame["stream"] == "stderr" else self.stdout).take(self._unseen(str(frame["stream"]), data))
            self._end(status)
        except AnswerError as error:
            self._fail(error.of_sandbox(self._box))
        except (ConnectionError, ValueError, KeyError, TypeError, binascii.Error) as error:
            self._fail(SandboxGone(self._box, f"its server broke off: {error}"))

    def _unseen(self, stream: str, data: bytes) -> bytes:
        known = min(len(data), self._skip.get(stream, 0))
        if known:
            self._skip[stream] -= known
        return data[known:]

    def _end(self, status: dict[str, Any]) -> None:
        used = status.get("usage")
        if used is not None:
            self.usage = Usage(
                user_s=used["userSeconds"],
                system_s=used["systemSeconds"],
                max_rss_bytes=used["maxRSSBytes"],
                duration_s=used["durationSeconds"],
            )
        self.timed_out = status.get("reason") == "DeadlineExceeded"
        if "exitCode" not in status:
            self._fail(SandboxGone(self._box, status.get("message", "it ended under the command")))
            return
        self.returncode = -int(status["signal"]) if "signal" in status else int(status["exitCode"])
        self._close()
        if not self._exited.done():
            self._exited.set_result(None)

    def _fail(self, error: SandboxError | ConfigError) -> None:
        if not self._exited.done():
            self._exited.set_exception(error)
        self._close()

    def _close(self) -> None:
        self.stdin.end()  # type: ignore[attr-defined]
        self.stdout.close()
        self.stderr.close()


def not_started(status: dict[str, Any], program: str | bytes) -> ExecFailed | None:
    """The error of a command that the server could not start."""
    word = status.get("errno")
    if status.get("phase") != "Failed" or word is None:
        return None
    return exec_failed(getattr(errno, str(word), errno.EIO), program)
