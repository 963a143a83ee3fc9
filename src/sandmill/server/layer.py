"""The one place where the server asks the sandbox layer for something. In: a spec as the API stores it. Out: live sandboxes, saved folders.

Whatever a Sandbox is asked for here is asked through its public methods, so that it may be one of another machine. Images are
in `picturing.py`, by the same rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sandmill.config.hosts import parse_hosts
from sandmill.config.manifest import EgressPolicy, EgressSection
from sandmill.config.quantities import parse_bytes, parse_cpu
from sandmill.errors import ConfigError, SandboxError, SandboxFileError
from sandmill.reports.inert import inert
from sandmill.sandboxes import PIPE, Egress, Sandbox, SandboxSpec
from sandmill.server.node_sandbox import NodeSandbox
from sandmill.server.refusals import Cause, Refusal
from sandmill.server.specs import DEFAULT_IMAGE, WORKSPACE

_LONGEST_LIFE_S: Final = 720 * 3600.0 + 600.0
"""A lifetime may be raised while the sandbox lives, and this limit not."""
_NEVER_S: Final = 366 * 86_400.0
_SAVE_S: Final = 120.0
_CHUNK: Final = 1 << 18
_UNREAD: Final = 64 << 20
_OVERHEAD: Final = 16 << 20
SECRETS: Final = "/run/secrets"


def check(spec: Mapping[str, Any]) -> None:
    """Refuses what no sandbox of this machine can be. Raises Refusal (Invalid)."""
    check_egress(spec["network"]["egress"])
    try:
        sandbox_spec(spec, {}, None if spec["image"] == DEFAULT_IMAGE else spec["image"])
    except ConfigError as error:
        field = {"workdir": "spec.workingDir", "env": "spec.env"}.get(error.field or "", f"spec.resources.{error.field}")
        raise Refusal("Invalid", error.message, causes=[Cause(field, "FieldValueInvalid", error.message)]) from error


def check_egress(asked: Mapping[str, Any]) -> None:
    """Refuses hosts, presets and policies that do not fit. Raises Refusal (Invalid)."""
    for key, hosts, presets in (("allow", asked.get("allow", ()), ()), ("presets", (), asked.get("presets", ()))):
        try:
            parse_hosts(hosts, presets)
        except ConfigError as error:
            raise Refusal(
                "Invalid", error.message, causes=[Cause(f"spec.network.egress.{key}", "FieldValueInvalid", error.message)]
            ) from error
    try:
        egress(asked)
    except ConfigError as error:
        raise Refusal("Invalid", error.message, causes=[Cause("spec.network.egress.policy", "FieldValueInvalid", error.message)]) from error


def egress(asked: Mapping[str, Any]) -> Egress:
    """`spec.network.egress` as a policy. Raises ConfigError."""
    return Egress.of(
        EgressSection(policy=EgressPolicy(asked["policy"]), allow=tuple(asked.get("allow", ())), presets=tuple(asked.get("presets", ())))
    )


def sandbox_spec(spec: Mapping[str, Any], env: Mapping[str, str], image: str | None) -> SandboxSpec:
    """The sandbox layer's spec; `image` is a digest. Limits of time and money are the server's to watch."""
    resources = spec["resources"]
    return SandboxSpec(
        cpu=parse_cpu(resources["cpu"], field="cpu"),
        memory_bytes=parse_bytes(resources["memory"], field="memory"),
        disk_bytes=parse_bytes(resources["disk"], field="disk"),
        timeout_s=_LONGEST_LIFE_S,
        idle_timeout_s=_NEVER_S,
        network=egress(spec["network"]["egress"]),
        env=dict(env),
        workdir=spec["workingDir"],
        image=image,
    )


async def create(spec: SandboxSpec, name: str, labels: Mapping[str, str]) -> Sandbox:
    """A live sandbox. Raises SandboxError."""
    return await Sandbox.from_spec.aio(spec, name=name, labels=labels, server="")


async def fork(sandbox: Sandbox, count: int) -> list[Sandbox]:
    """Sandboxes that start from its files as they are now, all or none. Raises SandboxError."""
    return await sandbox.fork.aio(count)


async def freeze(sandbox: Sandbox, *, frozen: bool) -> None:
    """Stops everything in it, or lets it go on. Idempotent. Raises SandboxError."""
    await (sandbox.freeze.aio() if frozen else sandbox.thaw.aio())


async def blocked(sandbox: Sandbox) -> list[dict[str, Any]]:
    """What its network policy refused, as JSON."""
    return [msgspec.to_builtins(one) for one in await sandbox.list_blocked.aio()]


def kept_folder(workdir: str) -> str:
    """What survives a stop: /workspace, or the working folder when that lies elsewhere."""
    return WORKSPACE if workdir == WORKSPACE or workdir.startswith(WORKSPACE + "/") else workdir


async def save(sandbox: Sandbox, target: Path) -> int:
    """Writes the kept folder to `target`, whole or not at all, and returns its size. Nothing may run in the sandbox any more.

    The archive is made by the sandbox's own tar and is never unpacked outside a sandbox: its names are whatever ran there chose.
    """
    if isinstance(sandbox, NodeSandbox):
        return await sandbox.save(target)
    folder = kept_folder(sandbox.spec.workdir)
    if sandbox.frozen:
        await sandbox.thaw.aio()
    process = await sandbox.exec.aio(
        *("tar", "-C", folder, "--format=posix", "--numeric-owner", "--sparse", "-cf", "-", "."),
        workdir="/",
        user=_keeper(sandbox),
        text=False,
        max_output=_UNREAD,
    )
    most, written = sandbox.spec.disk_bytes * 2 + _OVERHEAD, 0
    partial = target.with_suffix(".partial")
    partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        async with asyncio.timeout(_SAVE_S):
            with os.fdopen(os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
                async for piece in process.stdout:
                    assert isinstance(piece, bytes)
                    written += len(piece)
                    if written > most:
                        raise SandboxFileError(27, "the kept folder is larger than the sandbox's disk", folder)
                    await asyncio.to_thread(file.write, piece)
                code = await process.wait.aio()
                await asyncio.to_thread(_to_disk, file)
        if code != 0 or process.stdout.truncated:
            said = inert((await process.stderr.read_bytes.aio()).decode("utf-8", "replace"), limit=300)
            raise SandboxFileError(5, f"tar ended with {code}: {said}", folder)
        partial.rename(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        with contextlib.suppress(SandboxError):
            await process.kill.aio()
        raise
    return written


async def restore(sandbox: Sandbox, source: Path) -> None:
    """Puts a saved folder back into a fresh sandbox. Raises SandboxError, OSError, TimeoutError."""
    folder = kept_folder(sandbox.spec.workdir)
    process = await sandbox.exec.aio(
        *("tar", "-C", folder, "--numeric-owner", "-xpf", "-"), workdir="/", user=_keeper(sandbox), stdin=PIPE, text=False
    )
    async with asyncio.timeout(_SAVE_S):
        with source.open("rb") as file:
            while data := await asyncio.to_thread(file.read, _CHUNK):
                await process.stdin.write.aio(data)
        await process.stdin.close.aio()
        code = await process.wait.aio()
    if code != 0:
        said = inert((await process.stderr.read_bytes.aio()).decode("utf-8", "replace"), limit=300)
        raise SandboxFileError(5, f"tar ended with {code}: {said}", folder)


async def give_secrets(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Files under /run/secrets that only the sandbox's user can read."""
    placed = {f"{SECRETS}/{path}": data for path, data in files.items()}
    await sandbox.write_files.aio(placed, user=_keeper(sandbox))
    if _keeper(sandbox) == "root":
        account = sandbox.image.account
        owner = f"{account.uid}:{account.gid}"
        done = await sandbox.run.aio("chown", "-R", owner, SECRETS, workdir="/", user="root", timeout=_SAVE_S)
        if done.exit_code != 0:
            raise SandboxFileError(5, "the secrets' owner could not be set", SECRETS)
    await close_secrets(sandbox, files)


async def close_secrets(sandbox: Sandbox, files: Iterable[str]) -> None:
    """Only the sandbox's user can read them, and nobody write."""
    if placed := [f"{SECRETS}/{path}" for path in files]:
        await sandbox.run.aio("chmod", "0400", *placed, workdir="/", user=_keeper(sandbox), timeout=_SAVE_S)


async def take_secrets(sandbox: Sandbox, files: Iterable[str]) -> None:
    """Removes them from a sandbox that stands still. Raises SandboxError when one stays."""
    for path in files:
        try:
            await sandbox.remove.aio(f"{SECRETS}/{path}", user=_keeper(sandbox))
        except SandboxFileError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise


async def put_secrets(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Puts them back; no command can run meanwhile, so that their owner writes them."""
    await sandbox.write_files.aio({f"{SECRETS}/{path}": data for path, data in files.items()})


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _keeper(sandbox: Sandbox) -> str:
    """Who may read and restore every file: the sandbox's root, where there is one."""
    if isinstance(sandbox, NodeSandbox):
        return "user" if sandbox.rootless else "root"
    return "user" if os.geteuid() else "root"
