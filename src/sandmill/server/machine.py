"""What this machine has, and what of it is free just now. In: /proc and a folder. Out: a `Machine`, as placement compares them."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Annotated

import msgspec


class Amounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that sandboxes use up."""

    cpu: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    disk_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    pids: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine at one moment."""

    architecture: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]{1,32}$")]
    """As images name it: amd64, arm64."""
    capacity: Amounts
    free: Amounts
    load: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """Processes that ran or wanted to, on average over the last minute."""


_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """This machine's, as images name it."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def measured(folder: Path) -> Machine:
    """This machine now; its disk is the one that holds `folder`."""
    memory = _memory()
    disk = os.statvfs(folder)
    load, processes = _load()
    cpus = float(os.cpu_count() or 1)
    most = _number(Path("/proc/sys/kernel/pid_max"), 1 << 15)
    return Machine(
        architecture=architecture(),
        capacity=Amounts(cpu=cpus, memory_bytes=memory["MemTotal"], disk_bytes=disk.f_blocks * disk.f_frsize, pids=most),
        free=Amounts(
            cpu=max(0.0, cpus - load),
            memory_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),
            disk_bytes=disk.f_bavail * disk.f_frsize if disk.f_favail or not disk.f_files else 0,
            pids=max(0, most - processes),
        ),
        load=load,
    )


def _memory() -> dict[str, int]:
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(amount.split()[0]) * 1024
    return found


def _load() -> tuple[float, int]:
    """The load, and how many processes and threads there are."""
    words = Path("/proc/loadavg").read_text().split()
    return float(words[0]), int(words[3].partition("/")[2])


def _number(path: Path, otherwise: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return otherwise
