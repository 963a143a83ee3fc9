"""The process controller. In: Process objects to run. Out: their output, kept, and how each of them ended.

The record of a command is on disk before the command starts, so that a repeated request finds it instead of running it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from sandmill.config.quantities import parse_duration
from sandmill.errors import ConfigError, ExecFailed, SandboxError, SandboxGone, StoreUnavailable
from sandmill.sandboxes import PIPE, Process
from sandmill.sandboxes.backends.remote.process import RemoteProcess
from sandmill.sandboxes.streams import Output
from sandmill.server.boxes import Boxes
from sandmill.server.live import Live
from sandmill.server.outputs import Log, Outputs
from sandmill.server.records import Records, Value, fine_stamp, fresh
from sandmill.server.refusals import EXHAUSTED, Cause, Refusal, invalid
from sandmill.server.settings import Settings
from sandmill.server.statuses import LOST
from sandmill.server.tables import Forget, Write

ENDED: Final = ("Succeeded", "Failed", "Cancelled")
SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
KEPT_OUTPUT_BYTES: Final = 64 << 20
"""Output of one sandbox's ended commands that is kept; the oldest are forgotten first."""
_WAITING_INPUT: Final = 1 << 20
_UNREAD: Final = 2 << 20
"""More than one answer of a node brings at once."""
_NOT_FOUND, _NOT_RUNNABLE, _TIMED_OUT = 127, 126, 124
_log = logging.getLogger("sandmill.server")


class Running:
    """One command that runs, or has just ended."""

    def __init__(self, value: Value, live: Live, log: Log) -> None:
        self.uid: str = value["metadata"]["uid"]
        self.project: str = value["metadata"]["namespace"]
        self.name: str = value["metadata"]["name"]
        self.tty = bool(value["spec"].get("tty"))
        self.live = live
        self.log = log
        self.process: Process | None = None
        self.cancelled = False
        self.last_input = 0
        """The highest `seq` of stdin that was taken."""
        self.ended = asyncio.Event()
        self._waiting: deque[bytes | None] = deque()
        self._waiting_bytes = 0
        self._feeder: asyncio.Task[None] | None = None

    @property
    def room(self) -> bool:
        """More input can be queued."""
        return self._waiting_bytes < _WAITING_INPUT

    def feed(self, data: bytes | None) -> None:
        """Queues input, None is its end. Raises Refusal when too much waits."""
        if data is not None and self._waiting_bytes + len(data) > 2 * _WAITING_INPUT:
            raise Refusal("StdinBackpressure", "the command does not read its input fast enough", retry_after_s=1)
        self.live.touch()
        self._waiting.append(data)
        self._waiting_bytes += 0 if data is None else len(data)
        if self._feeder is None:
            self._feeder = asyncio.get_running_loop().create_task(self._feed())

    def close(self) -> None:
        """The command has ended: what waits will not be read."""
        if self._feeder is not None:
            self._feeder.cancel()

    async def _feed(self) -> None:
        assert self.process is not None
        with contextlib.suppress(BrokenPipeError, SandboxError, OSError):
            while self._waiting:
                data = self._waiting.popleft()
                if data is None:
                    await self._end_input()
                    continue
                await self.process.stdin.write.aio(data)
                self._waiting_bytes -= len(data)
        self._feeder = None

    async def _end_input(self) -> None:
        assert self.process is not None
        if self.tty:
            await self.process.stdin.write.aio(b"\x04")  # a terminal's end of input: closing its descriptor would not be seen
        else:
            await self.process.stdin.close.aio()


class Commands:
    """All processes of the server."""

    def __init__(self, records: Records, boxes: Boxes, outputs: Outputs, settings: Settings) -> None:
        self._records = records
        self._boxes = boxes
        self._outputs = outputs
        self._settings = settings
        self._running: dict[str, Running] = {}
        self._of_box: dict[str, deque[str]] = {}
        """Names of each sandbox's processes by its uid, oldest first."""
        self._numbers: dict[str, int] = {}
        self._kept: Counter[str] = Counter()
        """Bytes of output of each sandbox's ended processes by its uid."""
        self._tasks: set[asyncio.Task[None]] = set()
        for value in sorted(records.list("Process"), key=lambda value: value["spec"]["sequence"]):
            owner = value["metadata"]["ownerReferences"][0]["uid"]
            self._of_box.setdefault(owner, deque()).append(value["metadata"]["name"])
            self._numbers[owner] = value["spec"]["sequence"]
            self._kept[owner] += value["status"].get("outputBytes", 0)
        boxes.on_start = self._begin_main
        boxes.on_delete = self._forget_all

    def get(self, value: Value) -> Running | None:
        """The running command of a Process object, None once it has ended."""
        return self._running.get(value["metadata"]["uid"])

    def prepare(self, live: Live, spec: Value) -> Value:
        """A Process object that is about to run. Raises Refusal when too many run."""
        number = self._numbers[live.uid] = self._numbers.get(live.uid, 0) + 1
        names = self._of_box.setdefault(live.uid, deque())
        if sum(1 for running in self._running.values() if running.live is live) >= self._settings.max_processes:
            message = f"sandbox {live.name!r} runs {self._settings.max_processes} commands, which is its quota"
            raise Refusal("QuotaExceeded", message, retry_after_s=1, kind="processes", name=live.name)
        while len(names) >= self._settings.max_processes or self._kept[live.uid] > KEPT_OUTPUT_BYTES:
            if not self._forget_oldest(live, names):
                break
        owner = {"apiVersion": "nodus.dev/v1", "kind": "Sandbox", "name": live.name, "uid": live.uid, "controller": True}
        labels = {"nodus.dev/sandbox": live.name}
        value = fresh("Process", f"sb-{live.name}-{number}", live.project, {**spec, "sandbox": live.name, "sequence": number})
        value["metadata"] |= {"ownerReferences": [owner], "labels": labels}
        value["status"] = {"phase": "Running", "startTime": fine_stamp(time.time())}
        return value

    async def launch(self, live: Live, value: Value, answer: Callable[[Value], Write | None] | None = None) -> Value:
        """Runs a prepared process; returns its object, which says so if it could not be started. Raises Refusal."""
        spec = value["spec"]
        live.enter()
        entered = True
        try:
            self._of_box[live.uid].append(value["metadata"]["name"])
            uid = value["metadata"]["uid"]
            try:
                await self._records.save("Process", live.project, value, answer=answer)
            except StoreUnavailable as error:
                failed = {**value["status"], "phase": "Failed", "reason": "StartFailed", "message": f"nothing ran: {error}"}
                self._records.put("Process", live.project, {**value, "status": failed})
                raise
            running = self._running[uid] = Running(value, live, self._outputs.begin(uid))
            try:
                running.process = process = await live.sandbox.exec.aio(
                    *spec["command"],
                    env=_env(spec),
                    workdir=spec.get("workingDir"),
                    user=spec.get("user", "user"),
                    timeout=None if "timeout" not in spec else parse_duration(spec["timeout"]),
                    stdin=PIPE if spec.get("stdin") or spec.get("tty") else None,
                    tty=bool(spec.get("tty")),
                    text=False,
                    max_output=_UNREAD,
                )
            except (SandboxError, ConfigError) as error:
                await self._not_started(running, error)
                return self._stored(value)
            if isinstance(process, RemoteProcess):
                self._place(running, process)
            self._watch(running, process)
            entered = running.tty
        finally:
            if entered:  # an open terminal is no activity in itself; every other command is until it ends
                live.leave()
        return self._stored(value)

    async def cancel(self, value: Value) -> None:
        """Kills it. Idempotent."""
        running = self.get(value)
        if running is not None and running.process is not None:
            running.cancelled = True
            with contextlib.suppress(SandboxError):
                await running.process.kill.aio()

    async def kill_all(self, live: Live) -> None:
        """Kills everything that runs in a sandbox, background processes included."""
        for running in list(self._running.values()):
            running.cancelled |= running.live is live
        await live.sandbox.kill_processes.aio()

    async def signal(self, value: Value, name: str) -> None:
        """Sends a signal to its process group; nothing happens once it has ended."""
        running = self.get(value)
        if running is not None and running.process is not None:
            running.live.touch()
            with contextlib.suppress(SandboxError):
                await running.process.send_signal.aio(signal.Signals[name])

    async def resize(self, value: Value, rows: int, columns: int) -> None:
        """Tells its terminal's size."""
        running = self.get(value)
        if running is not None and running.process is not None:
            with contextlib.suppress(SandboxError, OSError):
                await running.process.resize.aio(rows, columns)

    def unended(self, uid: str, project: str) -> list[Value]:
        """The objects of a sandbox's commands that have not ended, by its uid."""
        found = [self._records.get("Process", project, name) for name in self._of_box.get(uid, ())]
        return [value for value in found if value is not None and value["status"]["phase"] not in ENDED]

    def take_up(self, value: Value, live: Live, log: Log, process: Process) -> None:
        """Goes on with a command that was started before this server was."""
        running = self._running[value["metadata"]["uid"]] = Running(value, live, log)
        running.process = process
        if not running.tty:
            live.enter()
        self._watch(running, process)

    def _watch(self, running: Running, process: Process) -> None:
        task = asyncio.get_running_loop().create_task(self._attend(running, process))
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _place(self, running: Running, process: RemoteProcess) -> None:
        """Notes what it is called on its node, so that a restarted server finds it."""
        value = self._records.get("Process", running.project, running.name)
        if value is not None:
            self._records.put("Process", running.project, {**value, "status": {**value["status"], "nodeProcess": process.name}})

    async def settled(self) -> None:
        """Until every process that has ended is recorded, for a moment."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5)

    async def _attend(self, running: Running, process: Process) -> None:
        """Keeps its output and records its end."""
        copies = [asyncio.ensure_future(self._copy(running, process.stdout, "stdout"))]
        if not running.tty:
            copies.append(asyncio.ensure_future(self._copy(running, process.stderr, "stderr")))
        gone: SandboxGone | None = None
        try:
            await process.wait.aio()
        except SandboxGone as error:
            gone = error
        await asyncio.gather(*copies, return_exceptions=True)
        if not running.tty:
            running.live.leave()
        self._end(running, _ending(running, process, gone))

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a command's end could not be recorded", exc_info=error)

    async def _copy(self, running: Running, stream: Output, name: str) -> None:
        """Reads while there is room; what nobody reads is bounded, dropped and in the end stopped by the sandbox itself."""
        async for piece in stream:
            assert isinstance(piece, bytes)
            self._outputs.add(running.log, name, piece)
            if running.log.room <= 0:
                running.log.truncated = True
                return

    async def _not_started(self, running: Running, error: Exception) -> None:
        number = getattr(error, "errno", None)
        code = {errno.ENOENT: _NOT_FOUND, errno.EACCES: _NOT_RUNNABLE}.get(number or 0)
        reason = "SandboxLost" if isinstance(error, SandboxGone) else "CommandNotFound" if code == _NOT_FOUND else "StartFailed"
        if isinstance(error, ExecFailed) and number in EXHAUSTED:
            reason = "ResourceExhausted"
        message = getattr(error, "strerror", None) or str(error)
        status: dict[str, Any] = {"phase": "Failed", "reason": reason, "message": message}
        if isinstance(error, ExecFailed):
            status["errno"] = errno.errorcode.get(number or 0, "EIO")
            if reason != "ResourceExhausted":  # what ran into a limit of ours has no exit code: nobody may take it for the command's
                status["exitCode"] = code if code is not None else _NOT_RUNNABLE
        self._end(running, status)

    def _end(self, running: Running, status: Mapping[str, Any]) -> None:
        running.close()
        self._running.pop(running.uid, None)
        pieces = self._outputs.rest(running.log)
        value = self._records.get("Process", running.project, running.name)
        if value is None or value["metadata"]["uid"] != running.uid:
            running.ended.set()
            return
        ended = {**value["status"], **status, "completionTime": fine_stamp(time.time()), "outputBytes": running.log.size_bytes}
        self._kept[running.live.uid] += running.log.size_bytes
        if running.log.truncated:
            ended["outputTruncated"] = True
        self._records.put("Process", running.project, {**value, "status": ended}, *pieces)
        self._main_ended(running, value, ended)
        running.ended.set()

    async def _begin_main(self, live: Live, value: Value) -> None:
        """The sandbox's own command, if it has one."""
        command = [*value["spec"].get("command", ()), *value["spec"].get("args", ())]
        if command:
            await self.launch(live, self.prepare(live, {"command": command, "main": True}))

    def _main_ended(self, running: Running, value: Value, status: Mapping[str, Any]) -> None:
        box = self._records.get("Sandbox", running.project, running.live.name)
        if value["spec"].get("main") and box is not None and "exitCode" in status:
            command = {"process": running.name, "exitCode": status["exitCode"]}
            self._records.put("Sandbox", running.project, {**box, "status": {**box["status"], "command": command}})

    def _stored(self, value: Value) -> Value:
        return self._records.get("Process", value["metadata"]["namespace"], value["metadata"]["name"]) or value

    def _forget_oldest(self, live: Live, names: deque[str]) -> bool:
        """Removes the oldest ended process; False when all still run."""
        for name in names:
            value = self._records.get("Process", live.project, name)
            if value is None or value["status"]["phase"] in ENDED:
                names.remove(name)
                self._kept[live.uid] -= 0 if value is None else value["status"].get("outputBytes", 0)
                self._forget(live.project, name)
                return True
        return False

    def _forget(self, project: str, name: str) -> None:
        if (value := self._records.get("Process", project, name)) is not None:
            uid = value["metadata"]["uid"]
            self._outputs.forget(uid)
            self._records.remove("Process", project, name, Forget(uid))

    def _forget_all(self, box: Value) -> None:
        self._numbers.pop(box["metadata"]["uid"], None)
        self._kept.pop(box["metadata"]["uid"], None)
        for name in self._of_box.pop(box["metadata"]["uid"], ()):
            self._forget(box["metadata"]["namespace"], name)


def _ending(running: Running, process: Process, gone: SandboxGone | None) -> dict[str, Any]:
    """How it ended, as its status."""
    if gone is not None and running.live.stopping == LOST:
        return {"phase": "Failed", "reason": LOST, "message": f"{gone.reason}; its output up to then is kept"}
    if running.live.stopping is not None and (gone is not None or process.signal is not None):
        return {"phase": "Cancelled", "reason": running.live.stopping, "message": "its sandbox was stopped under it; its output is kept"}
    if gone is not None:
        return {"phase": "Failed", "reason": "SandboxLost", "message": str(gone)}
    code = process.returncode
    assert code is not None
    out: dict[str, Any] = {"exitCode": code if code >= 0 else 128 - code, **({} if code >= 0 else {"signal": -code})}
    if process.usage is not None:
        out["usage"] = {
            "userSeconds": round(process.usage.user_s, 6),
            "systemSeconds": round(process.usage.system_s, 6),
            "maxRSSBytes": process.usage.max_rss_bytes,
            "durationSeconds": round(process.usage.duration_s, 6),
        }
    if process.timed_out:
        return {
            **out,
            "phase": "Failed",
            "reason": "DeadlineExceeded",
            "exitCode": _TIMED_OUT,
            "message": "it passed its timeout and was killed",
        }
    if running.cancelled:
        return {**out, "phase": "Cancelled", "reason": "Cancelled"}
    if process.truncated and code < 0:
        return {**out, "phase": "Failed", "reason": "OutputFlood", "message": "it wrote far more than is kept and was killed"}
    return {**out, "phase": "Succeeded" if code == 0 else "Failed"}


def _env(spec: Value) -> dict[str, str]:
    env = {variable["name"]: variable.get("value", "") for variable in spec.get("env", ())}
    return {"TERM": "xterm-256color", **env} if spec.get("tty") else env


def check_env(spec: Value) -> None:
    """A command's environment takes values only: secrets are given to the sandbox. Raises Refusal."""
    wrong = [
        Cause(f"spec.env[{place}].valueFrom", "FieldValueNotSupported", "secrets are given to the sandbox, in its spec")
        for place, variable in enumerate(spec.get("env", ()))
        if "valueFrom" in variable
    ]
    if wrong:
        raise invalid("processes", "", wrong)
