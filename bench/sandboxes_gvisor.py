"""gVisor for bench/sandboxes.py: `runsc` by itself as a peer, and as Sandmill's backend. In: a folder. Out: what to time.

It is some ten times slower than everything else there, so it takes part in every `SELDOM`th round only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from sandmill.sandboxes import Sandbox, SandboxSpec

SELDOM = 5


def installed() -> bool:
    return shutil.which("runsc") is not None and os.geteuid() == 0


def runsc_bundle(folder: Path) -> None:
    """A bundle like crun's: the host's /usr as programs, no network, `echo hi`."""
    root = folder / "rootfs"
    for name in ("usr", "proc", "dev", "tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}, {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}]
    mounts.append({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]})  # type: ignore[dict-item]
    config = {
        "ociVersion": "1.0.2",
        "process": {"terminal": False, "user": {"uid": 1000, "gid": 1000}, "args": ["/bin/echo", "hi"], "env": ["PATH=/bin"], "cwd": "/"},
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": name} for name in ("pid", "mount", "network", "ipc", "uts")]},
    }
    (folder / "config.json").write_text(json.dumps(config))


def cold_start(spec: SandboxSpec) -> float:
    began = time.perf_counter()
    box = Sandbox.from_spec(msgspec.structs.replace(spec, backend="gvisor"))
    box.run("/bin/echo", "hi")
    elapsed = time.perf_counter() - began
    box.terminate()
    return elapsed


@contextlib.contextmanager
def box(spec: SandboxSpec) -> Iterator[Sandbox | None]:
    """A sandbox on gVisor, None where that is not installed."""
    if not installed():
        yield None
        return
    with Sandbox.from_spec(msgspec.structs.replace(spec, backend="gvisor")) as made:
        yield made


def starts(
    folder: Path, spec: SandboxSpec, first_output: Callable[[list[str]], float], number: int
) -> list[tuple[str, Callable[[], float]]]:
    """What one round times, if it is one of those."""
    if number % SELDOM or not installed():
        return []
    if not folder.exists():
        runsc_bundle(folder)
    argv = ["runsc", "--root", str(folder / "state"), "--network=none", "--ignore-cgroups", "run", "--bundle", str(folder), f"b-{number}"]
    return [("gVisor (runsc)", partial(first_output, argv)), ("sandmill on gVisor, cold", partial(cold_start, spec))]
