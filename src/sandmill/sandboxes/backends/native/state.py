"""What lies on disk while sandboxes live: one folder per owning process, held by a lock, removed with it.

    <state>/owners/<name>/lock          flock held by the owner and its warden: free means both are dead
                          owner.json    who it is and which control groups are its own
                          control.sock  where other processes ask for its sandboxes
    <state>/images/                     see images/store.py; the warden finds its layers from the owner's folder

In: a state root ($SANDMILL_STATE, /var/lib/sandmill for root, ~/.local/state/sandmill). Out: a claimed folder; and the sweep that
removes what dead owners left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sandmill.sandboxes.backends.native import cgroups

_LONGEST_CLAIM_S = 60.0
_DYING_S = 5.0


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """owner.json."""

    pid: int
    cgroups: tuple[str, ...] = ()
    version: int = 1


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A live folder. `lock` and `folder_fd` are descriptors that the warden inherits."""

    folder: Path
    folder_fd: int
    lock: int
    cgroups: tuple[Path, ...]


def state_root() -> Path:
    """The folder that holds all owners' folders."""
    if named := os.environ.get("SANDMILL_STATE"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/sandmill")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sandmill"


def layers_root(root: Path | None = None) -> Path:
    """Where the layers of images lie. The warden holds it open from its start."""
    return (root or state_root()) / "images" / "layers"


def claim(plan: cgroups.CgroupPlan, root: Path | None = None) -> Claim:
    """A fresh folder, visible to the sweep only once it is locked, with its control groups made. Raises OSError."""
    owners = (root or state_root()) / "owners"
    owners.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    fresh = owners / f".{name}"
    fresh.mkdir(mode=0o700)
    lock = os.open(fresh / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    planned = tuple(folder / f"sandmill-{name}" for folder in plan.folders)
    (fresh / "owner.json").write_bytes(msgspec.json.encode(Owner(pid=os.getpid(), cgroups=tuple(map(str, planned)))))
    folder = owners / name
    fresh.rename(folder)
    try:
        made = plan.make(planned[0].name) if planned else ()
    except OSError:
        os.close(lock)
        discard(folder)
        raise
    return Claim(folder=folder, folder_fd=os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), lock=lock, cgroups=made)


def live_owners(root: Path | None = None) -> list[Path]:
    """Folders whose owner or warden lives."""
    return [folder for folder in _folders(root) if _is_locked(folder)]


def sweep(root: Path | None = None) -> int:
    """Removes folders and control groups of owners that are dead, warden included. Returns how many."""
    dead = [folder for folder in _folders(root) if not _is_locked(folder)]
    for folder in dead:
        discard(folder)
    for unfinished in ((root or state_root()) / "owners").glob(".*"):
        if time.time() - unfinished.stat().st_mtime > _LONGEST_CLAIM_S:
            shutil.rmtree(unfinished, ignore_errors=True)
    return len(dead)


def discard(folder: Path) -> None:
    """Removes one owner's control groups and folder. Idempotent.

    Processes that were just killed take a moment to leave their groups. If some never do, the folder stays for a later sweep.
    """
    groups: tuple[str, ...] = ()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        groups = msgspec.json.decode((folder / "owner.json").read_bytes(), type=Owner).cgroups
    deadline = time.monotonic() + _DYING_S
    while [group for group in groups if not cgroups.remove(Path(group))]:
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path | None) -> Iterator[Path]:
    owners = (root or state_root()) / "owners"
    try:
        names = sorted(os.listdir(owners))
    except FileNotFoundError:
        return
    yield from (owners / name for name in names if not name.startswith("."))


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return folder.exists() and time.time() - folder.stat().st_mtime < _LONGEST_CLAIM_S
    except PermissionError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
