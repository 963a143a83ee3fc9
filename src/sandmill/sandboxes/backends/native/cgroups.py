"""Where this process may put control groups. In: /proc/self/{mountinfo,cgroup}. Out: a plan of folders, or a sentence why there is none.

New groups go below the process's own ones, so that whatever bounds this process bounds its sandboxes too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

V1_CONTROLLERS: Final = ("cpu", "memory", "pids")
_SHARE: Final = 4
"""All sandboxes of an owner together weigh as much as this many processes of the host: enough to answer, too little to starve it."""


class CgroupPlan(NamedTuple):
    """`folders` are this process's own, one per controller (version 1) or one (version 2); version 0 has none and says why."""

    version: int
    folders: tuple[Path, ...]
    lack: str = ""

    def make(self, name: str) -> tuple[Path, ...]:
        """Creates `name` in every folder. Raises OSError."""
        made = tuple(folder / name for folder in self.folders)
        for place in made:
            place.mkdir(mode=0o755)
        if self.version == 2:
            (made[0] / "cgroup.subtree_control").write_text("+cpu +memory +pids")
            (made[0] / "cpu.weight").write_text(str(100 * _SHARE))
        elif self.version == 1:
            (made[0] / "cpu.shares").write_text(str(1024 * _SHARE))
        return made


def plan(proc: Path = Path("/proc/self")) -> CgroupPlan:
    """Finds version 1 with its three controllers, else version 2 with them delegated, else nothing."""
    if os.geteuid() != 0:
        return CgroupPlan(0, (), "control groups need root")
    own = _own_groups(proc)
    mounts = _mounts(proc)
    v1 = [_folder(mounts[name], own[name]) for name in V1_CONTROLLERS if name in mounts and name in own]
    if len(v1) == len(V1_CONTROLLERS):
        lacking = [str(folder) for folder in v1 if not os.access(folder, os.W_OK)]
        return CgroupPlan(0, (), f"{lacking[0]} is read-only") if lacking else CgroupPlan(1, tuple(v1))
    if "" in mounts:
        return _plan_v2(mounts[""][0])
    return CgroupPlan(0, (), "no control group file system with cpu, memory and pids is mounted")


def _plan_v2(root: Path) -> CgroupPlan:
    try:
        offered = set((root / "cgroup.controllers").read_text().split())
        missing = set(V1_CONTROLLERS) - offered
        if missing:
            return CgroupPlan(0, (), f"the control groups at {root} do not offer {', '.join(sorted(missing))}")
        (root / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    except OSError as error:
        return CgroupPlan(0, (), f"the control groups at {root} cannot be delegated ({error.strerror})")
    return CgroupPlan(2, (root,))


def _own_groups(proc: Path) -> dict[str, str]:
    groups: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounts(proc: Path) -> dict[str, tuple[Path, str]]:
    """Controller ("" for version 2) to mount point and the group that is mounted there."""
    found: dict[str, tuple[Path, str]] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", (Path(point), root))
        elif kind == "cgroup":
            for name in set(options.split(",")) & set(V1_CONTROLLERS):
                found.setdefault(name, (Path(point), root))
    return found


def _folder(mount: tuple[Path, str], own: str) -> Path:
    point, root = mount
    below = own.removeprefix(root.rstrip("/")) if own.startswith(root) else ""
    folder = point / below.lstrip("/")
    return folder if folder.is_dir() else point


def remove(folder: Path) -> bool:
    """Removes a group and the groups below it. False while something of it still holds processes."""
    try:
        for child in list(folder.iterdir()):
            if child.is_dir():
                remove(child)
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
