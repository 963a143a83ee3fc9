"""What a task asks of its sandboxes. In: its limits, image and files. Out: specs, files in place, a healthy machine."""

from __future__ import annotations

import asyncio
import posixpath
import stat

import msgspec

from sandmill.environments.formats.harbor.folder import Files, Folder
from sandmill.environments.formats.harbor.options import Options
from sandmill.environments.formats.harbor.tables import Box, Healthcheck
from sandmill.errors import SandboxError
from sandmill.sandboxes import Egress, Image, Sandbox, SandboxSpec
from sandmill.sandboxes.backends.native import wire

_MIB = 1 << 20
_ROOM_BYTES = 256 << 20


def agent_spec(folder: Folder, image: Image, options: Options) -> SandboxSpec:
    """The agent's sandbox."""
    return _spec(folder.box, image, _egress(*folder.agent_network, options))


def grading_spec(box: Box, image: Image, options: Options, network_mode: str, hosts: tuple[str, ...], timeout_s: float) -> SandboxSpec:
    """A verifier's sandbox. It holds the agent's files once more beside what the verifier writes, however full the agent left its own."""
    spec = _spec(box, image, _egress(network_mode, hosts, options), timeout_s)
    disk_bytes = 2 * spec.disk_bytes + _ROOM_BYTES
    return msgspec.structs.replace(spec, disk_bytes=disk_bytes, memory_bytes=spec.memory_bytes + disk_bytes)


def _spec(box: Box, image: Image, network: Egress, timeout_s: float = 86_400.0) -> SandboxSpec:
    return SandboxSpec.of(
        cpu=box.cpus or 1,
        memory=2 << 30 if box.memory_mb is None else box.memory_mb * _MIB,
        disk=1 << 30 if box.storage_mb is None else box.storage_mb * _MIB,
        timeout=timeout_s,
        idle_timeout=timeout_s,
        network=network,
        env=box.env,
        workdir=box.workdir or None,
        image=image.digest,
    )


def _egress(mode: str, hosts: tuple[str, ...], options: Options) -> Egress:
    if options.network == "deny" or mode == "no-network":
        return Egress.deny()
    return Egress.allow(*hosts) if mode == "allowlist" else Egress.open()


async def lay(sandbox: Sandbox, place: str, files: Files, *, user: str) -> None:
    """Writes files with their permissions below `place`. Raises SandboxFileError."""
    batch = [wire.entry(place, stat.S_IFDIR | 0o755)] if place == "/solution" else []
    batch += [wire.entry(posixpath.join(place, name), stat.S_IFREG | mode, data) for name, (mode, data) in files.items()]
    await sandbox.write_batch(b"".join(batch), user)


async def wait_healthy(sandbox: Sandbox, check: Healthcheck, task: str) -> None:
    """Returns when the check's command ends with 0. Raises SandboxError after its last try."""
    deadline = asyncio.get_running_loop().time() + check.start_period_sec
    failures = 0
    while True:
        done = await sandbox.run.aio("/bin/sh", "-c", check.command, timeout=check.timeout_sec, merge_stderr=True)
        if done.exit_code == 0 and not done.timed_out:
            return
        starting = asyncio.get_running_loop().time() < deadline
        failures += not starting
        if failures >= check.retries:
            raise SandboxError(f"the health check of task {task} failed {failures} times: {check.command[:200]!r}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
