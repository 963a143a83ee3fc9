"""What this machine's kernel allows sandboxes, in plain sentences. In: nothing. Out: findings, each with its fix.

The trial sandbox is removed again: nothing is left behind.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sandmill.errors import SandmillError
from sandmill.sandboxes.backends.native import cgroups, state
from sandmill.sandboxes.backends.native.node import WARDEN
from sandmill.sandboxes.dual import block_on
from sandmill.sandboxes.images import store
from sandmill.sandboxes.sandbox import Sandbox
from sandmill.sandboxes.spec import Egress, SandboxSpec

_OLDEST_KERNEL = (5, 11)
_WHOLE_OVERLAY_KERNEL = (6, 6)
_CHECK_SPEC = SandboxSpec(memory_bytes=64 << 20, disk_bytes=4 << 20, timeout_s=60.0, backend="native")
_NO_NETWORK = Egress.deny()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One capability. `needed`: without it no sandbox can be made here."""

    name: str
    ok: bool
    says: str
    fix: str = ""
    needed: bool = False


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything found. `ready`: sandboxes can be made here."""

    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        """Nothing that is needed is missing."""
        return all(finding.ok for finding in self.findings if finding.needed)


def probe() -> Probe:
    """Looks at the kernel and then makes one real sandbox, runs a command in it, and removes it."""
    return Probe(findings=tuple(_findings()))


def _findings() -> Iterator[Finding]:
    kernel = _kernel()
    yield kernel
    yield _warden()
    if WARDEN.exists() and kernel.ok:
        trial = _trial()
        yield trial
        if trial.ok:
            yield _network()
            yield _images()
    yield _root()
    yield _limits()
    yield _overlay()


def _version() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def _kernel() -> Finding:
    says = f"{platform.system()} {platform.release()} on {platform.machine()}"
    good = platform.system() == "Linux" and _version() >= _OLDEST_KERNEL and platform.machine() in ("x86_64", "aarch64")
    fix = "" if good else f"sandboxes need Linux {'.'.join(map(str, _OLDEST_KERNEL))} or newer on x86_64 or aarch64"
    return Finding(name="sandbox kernel", ok=good, says=says, fix=fix, needed=True)


def _warden() -> Finding:
    good = os.access(WARDEN, os.X_OK)
    fix = "" if good else "install a C compiler (Debian: apt-get install gcc libc6-dev) and install sandmill again"
    return Finding(name="sandbox warden", ok=good, says="built" if good else "not built with this installation", fix=fix, needed=True)


async def _try(network: Egress = _NO_NETWORK) -> str:
    async with await Sandbox.from_spec.aio(msgspec.structs.replace(_CHECK_SPEC, network=network), name="probe", server="") as sandbox:
        done = await sandbox.run.aio("sh", "-c", "id -u; cat /proc/1/environ", timeout=10)
        return done.stdout.decode("utf-8", "replace").strip()


def _trial() -> Finding:
    try:
        uid = block_on(_try())
    except (SandmillError, OSError) as error:
        says, _, told = str(error).rpartition("; ")
        fix = told if "SANDMILL_STATE" in told else _unlock()
        return Finding(name="sandboxes", ok=False, says=says if fix == told else str(error), fix=fix, needed=True)
    return Finding(name="sandboxes", ok=uid == "1000", says=f"made one, ran a command in it as uid {uid}, removed it", needed=True)


def _network() -> Finding:
    """Named hosts need nothing but what sandboxes need anyway; open egress needs the kernel's nf_tables."""
    try:
        block_on(_try(Egress.allow("example.org")))
    except (SandmillError, OSError) as error:
        return Finding(name="sandbox network", ok=False, says=str(error), fix="use sandboxes without a network, which is the default")
    try:
        block_on(_try(Egress.open()))
    except (SandmillError, OSError) as error:
        fix = "load the kernel's nf_tables, nft_redir and nf_conntrack, or allow hosts by name"
        return Finding(name="sandbox network", ok=False, says=f"to named hosts only: {error}", fix=fix)
    return Finding(name="sandbox network", ok=True, says="none by default; to named hosts or to every public address where asked for")


async def _try_image() -> None:
    async with await Sandbox.from_spec.aio(_CHECK_SPEC, name="probe", server="") as sandbox:
        for copy in await sandbox.fork.aio(1):
            await copy.terminate.aio()


def _images() -> Finding:
    name = "sandbox images"
    try:
        block_on(_try_image())
    except (SandmillError, OSError) as error:
        return Finding(name=name, ok=False, says=f"sandboxes cannot start from images: {error}", fix="set SANDMILL_STATE to another disk")
    return Finding(
        name=name, ok=True, says=f"made one, started a sandbox from it, removed both; at most {_store_limit()} of images are kept"
    )


def _store_limit() -> str:
    return f"{store().limit_bytes / (1 << 30):.3g} GiB"


def _unlock() -> str:
    """What usually stands in the way of unprivileged namespaces."""
    for name in ("kernel/apparmor_restrict_unprivileged_userns", "kernel/unprivileged_userns_clone", "user/max_user_namespaces"):
        path = Path("/proc/sys") / name
        value = path.read_text().strip() if path.exists() else None
        blocking = "1" if "apparmor" in name else "0"
        if value == blocking:
            wanted = {"1": "0", "0": "1"}[blocking] if "max" not in name else "65536"
            return f"as root: sysctl -w {name.replace('/', '.')}={wanted}"
    return "run as root, or in a container that may create namespaces (docker run --privileged)"


def _root() -> Finding:
    if os.geteuid() == 0:
        return Finding(name="sandbox root", ok=True, says="running as root: full id ranges, an in-sandbox root user")
    says = "running without root: no memory and cpu limits per sandbox (memory is bounded per process) and no in-sandbox root user"
    return Finding(name="sandbox root", ok=False, says=says, fix="run as root to have them")


def _limits() -> Finding:
    plan = cgroups.plan()
    if plan.version:
        return Finding(name="sandbox limits", ok=True, says=f"cpu, memory and process limits by control groups version {plan.version}")
    fix = "" if os.geteuid() else "mount the control groups of this container writable (docker run --privileged or --cgroupns=host)"
    return Finding(name="sandbox limits", ok=False, says=f"no control groups: {plan.lack}", fix=fix)


def _overlay() -> Finding:
    good = _version() >= _WHOLE_OVERLAY_KERNEL
    says = f"state in {state.state_root()}, sandboxes' files in memory"
    if not good:
        says += "; on kernels before 6.6 a sandbox cannot delete folders that came with its image"
    return Finding(name="sandbox storage", ok=True, says=says)
