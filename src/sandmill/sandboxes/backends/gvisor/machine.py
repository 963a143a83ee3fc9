"""One gVisor sandbox: a `runsc run` whose standard streams are the guest's. In: a bundle. Out: bytes both ways, and its removal.

The sandbox ends when its standard input does: so it also ends with its owner, whatever kills that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from sandmill.errors import SandboxCreateFailed
from sandmill.sandboxes.backends.guest.ending import end_tasks, hold, let_go
from sandmill.sandboxes.backends.gvisor.place import Place, delete, remove_group
from sandmill.sandboxes.backends.seam import Hearing
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.spec import SandboxSpec

PLATFORMS: Final = ("systrap", "ptrace")
_OWN_MEMORY_BYTES: Final = 96 << 20
"""What runsc's two processes need for themselves, beyond what the sandbox may have."""
_PERIOD_US: Final = 100_000
_PATIENCE_S: Final = 3.0
_DYING_S: Final = 5.0
_CHUNK: Final = 1 << 16
_ENTER: Final = 'for group in $0; do echo 0 > "$group" || exit 126; done; exec "$@"'


class GvisorMachine:
    """A running `runsc run`."""

    def __init__(self, id: str, place: Place, hearing: Hearing) -> None:
        self.id = id
        self._place = place
        self._hearing = hearing
        self._bundle = place.folder / id
        self._groups: tuple[Path, ...] = ()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._said = b""
        self._descriptor = -1

    @property
    def bundle(self) -> Path:
        """Where its configuration is written."""
        return self._bundle

    async def start(self, spec: SandboxSpec, platform: str) -> None:
        """Starts it. Raises SandboxCreateFailed."""
        place = self._place
        try:
            self._groups = self._make_groups(spec)
            argv = [place.runsc, "--root", str(place.folder / "runsc"), f"--platform={platform}", "--network=none", "--ignore-cgroups"]
            argv += ["--overlay2=root:memory", "run", "--bundle", str(self._bundle), self.id]
            self._process = process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", _ENTER, " ".join(f"{group}/{self._task_list}" for group in self._groups), *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxCreateFailed(error.errno, f"could not start runsc: {error.strerror}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._descriptor = process.stdin.get_extra_info("pipe").fileno()
        hold(self._descriptor)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._hear(process, process.stdout)), loop.create_task(self._note(process.stderr))]

    def send(self, data: bytes) -> None:
        """For the guest's standard input."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    async def destroy(self) -> None:
        """Ends it and removes what belongs to it."""
        process = self._process
        if process is not None and process.stdin is not None:
            let_go(self._descriptor)
            process.stdin.close()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await process.wait()
            except TimeoutError:
                if not [remove_group(group) for group in self._groups]:
                    await in_thread(lambda: delete(self._place.runsc, self._place.folder / "runsc", self.id))
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await end_tasks(self._tasks)
        await self._clear()

    async def _clear(self) -> None:
        deadline = asyncio.get_running_loop().time() + _DYING_S
        while left := [group for group in self._groups if not remove_group(group)]:
            if asyncio.get_running_loop().time() > deadline:
                raise SandboxCreateFailed(f"the control group {left[0]} could not be removed")
            await asyncio.sleep(0.01)
        await in_thread(lambda: shutil.rmtree(self._bundle, ignore_errors=True))

    @property
    def _task_list(self) -> str:
        return "cgroup.procs" if self._place.plan.version == 2 else "tasks"

    def _make_groups(self, spec: SandboxSpec) -> tuple[Path, ...]:
        groups = tuple(group / self.id for group in self._place.groups)
        for group in groups:
            group.mkdir()
        memory, cpu = spec.memory_bytes + _OWN_MEMORY_BYTES, max(1000, round(spec.cpu * _PERIOD_US))
        bound = spec.cpu < (os.cpu_count() or 1)
        if self._place.plan.version == 2:
            (groups[0] / "memory.max").write_text(str(memory))
            if bound:
                (groups[0] / "cpu.max").write_text(f"{cpu} {_PERIOD_US}")
        elif groups:
            (groups[1] / "memory.limit_in_bytes").write_text(str(memory))
            if bound:
                (groups[0] / "cpu.cfs_quota_us").write_text(str(cpu))
        return groups

    async def _hear(self, process: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_CHUNK):
            self._hearing.received(data)
        await process.wait()
        self._hearing.ended(self._why())

    async def _note(self, stream: asyncio.StreamReader) -> None:
        """The last that was said on standard error: by runsc when it fails, never by a command."""
        while data := await stream.read(_CHUNK):
            self._said = (self._said + data)[-2000:]

    def _why(self) -> str:
        for group in self._groups:
            for name in ("memory.oom_control", "memory.events"):
                with contextlib.suppress(OSError):
                    counts = dict(line.split() for line in (group / name).read_text().splitlines())
                    if int(counts.get("oom_kill", 0)):
                        return "its memory was used up"
        lines = self._said.decode("utf-8", "backslashreplace").strip().splitlines()
        return f"runsc said {lines[-1][:300]!a}" if lines else ""
