"""What lies on disk while gVisor sandboxes live: one folder per owning process, held by a lock, removed with it.

    <state>/gvisor/<pid>-<hex>/lock           held by its owner: free means that one is dead
                               groups         the control groups that are its own
                               root/          what every sandbox's root starts from
                               runsc/         runsc's own state
                               <id>/          one sandbox's bundle

In: a state root. Out: a claimed folder; and the sweep that ends what dead owners left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sandmill.sandboxes.backends.guest.ending import hold, let_go
from sandmill.sandboxes.backends.native import cgroups
from sandmill.sandboxes.backends.native.image import PROGRAM_FOLDERS, Entry, entries
from sandmill.sandboxes.backends.native.state import state_root

_DELETE_S: Final = 10.0
_DYING_S: Final = 5.0
_LONGEST_CLAIM_S: Final = 60.0


class Place:
    """A live owner's folder."""

    def __init__(self, runsc: str) -> None:
        """Claims it. Raises OSError."""
        self.runsc = runsc
        owners = state_root() / "gvisor"
        owners.mkdir(mode=0o711, parents=True, exist_ok=True)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        fresh = owners / f".{name}"
        fresh.mkdir(mode=0o711)
        self._lock = os.open(fresh / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        hold(self._lock)
        self.plan = cgroups.plan()
        groups = [folder / f"sandmill-gvisor-{name}" for folder in self.plan.folders]
        (fresh / "groups").write_text("".join(f"{group}\n" for group in groups))
        self.folder = owners / name
        fresh.rename(self.folder)
        self.root = self.folder / "root"
        try:
            self.groups = self.plan.make(f"sandmill-gvisor-{name}") if groups else ()
            _fill(self.root)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Ends everything in it and removes it."""
        discard(self.folder, self.runsc)
        let_go(self._lock)
        os.close(self._lock)


def sweep(runsc: str) -> int:
    """Ends and removes what owners that are dead have left. Returns how many."""
    owners = state_root() / "gvisor"
    dead = [folder for folder in _folders(owners) if _is_free(folder)]
    for folder in dead:
        discard(folder, runsc)
    return len(dead)


def discard(folder: Path, runsc: str) -> None:
    """Removes one owner's sandboxes, control groups and folder. Idempotent; what cannot be removed stays for a later sweep."""
    groups = [Path(line) for line in _lines(folder / "groups")]
    if not groups:  # else whatever runs is in them, and killing that takes no 5 seconds
        for name in _names(folder / "runsc"):
            if "_sandbox:" in name:
                delete(runsc, folder / "runsc", name.partition("_sandbox:")[0])
    deadline = time.monotonic() + _DYING_S
    while [group for group in groups if not remove_group(group)]:
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def delete(runsc: str, state: Path, id: str) -> None:
    """Kills a sandbox that may or may not be there."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [runsc, "--root", str(state), "delete", "--force", id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_DELETE_S,
            check=False,
        )


def remove_group(group: Path) -> bool:
    """Kills whatever is left in a control group and those below it, and removes it. False while something still dies."""
    for place, _, names in os.walk(group):
        with contextlib.suppress(OSError, ValueError):
            for pid in (Path(place) / "cgroup.procs").read_text().split() if "cgroup.procs" in names else ():
                os.kill(int(pid), 9)
    return cgroups.remove(group)


def _fill(root: Path) -> None:
    """The same /etc, folders and links that a native sandbox has."""
    root.mkdir(mode=0o755)
    for entry in entries():
        _put(root / entry.path, entry)
    for name in PROGRAM_FOLDERS:
        if (Path("/") / name).is_dir() and not (Path("/") / name).is_symlink():
            (root / name).mkdir(exist_ok=True)
    (root / ".guest").touch(0o755)


def _put(path: Path, entry: Entry) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if stat.S_ISDIR(entry.mode):
        path.mkdir(exist_ok=True)
    elif stat.S_ISLNK(entry.mode):
        path.symlink_to(os.fsdecode(entry.data))
    else:
        path.write_bytes(entry.data)
        if entry.modified:
            os.utime(path, (entry.modified, entry.modified))
    if not stat.S_ISLNK(entry.mode):
        path.chmod(stat.S_IMODE(entry.mode))


def _folders(owners: Path) -> Iterator[Path]:
    for name in _names(owners):
        folder = owners / name
        if not name.startswith("."):
            yield folder
        elif time.time() - folder.stat().st_mtime > _LONGEST_CLAIM_S:
            shutil.rmtree(folder, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []


def _is_free(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
