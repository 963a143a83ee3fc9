"""One gVisor sandbox as runsc wants it told. In: a spec and the guest's arguments. Out: an OCI configuration.

Only the guest's bounding set of capabilities is given; the one user of the host's files is root, who owns nothing that can be written.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sandmill.sandboxes.backends.native.image import PROGRAM_FOLDERS
from sandmill.sandboxes.backends.native.node import USER_UID, WARDEN
from sandmill.sandboxes.spec import SandboxSpec

GUEST: Final = "/.guest"
_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP")
_WRITABLE: Final = {"/tmp": "mode=1777", "/var/tmp": "mode=1777", "/home/user": f"mode=0755,uid={USER_UID},gid={USER_UID}"}
_OPEN_FILES: Final = (1024, 65536)


def write_bundle(folder: Path, root: Path, spec: SandboxSpec, guest: Sequence[str]) -> None:
    """Writes `config.json`."""
    held = [f"CAP_{name}" for name in _CAPABILITIES]
    config: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [GUEST, *guest],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), held),
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": _OPEN_FILES[0], "hard": _OPEN_FILES[1]}],
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": False},
        "hostname": "sandbox",
        "mounts": [*_system(), *_programs(), *_writable(spec)],
        "linux": {
            "namespaces": [{"type": name} for name in ("pid", "mount", "network", "ipc", "uts")],
            "resources": {"memory": {"limit": spec.memory_bytes}},
        },
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(config))


def _system() -> list[dict[str, Any]]:
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/sys", "type": "tmpfs", "source": "tmpfs", "options": ["ro"]},
        _bind(str(WARDEN), GUEST),
    ]


def _programs() -> list[dict[str, Any]]:
    real = [name for name in ("usr", *PROGRAM_FOLDERS) if (Path("/") / name).is_dir() and not (Path("/") / name).is_symlink()]
    return [_bind(f"/{name}", f"/{name}") for name in real]


def _writable(spec: SandboxSpec) -> list[dict[str, Any]]:
    """Each holds `disk` at most. Elsewhere only in-sandbox root can write, into memory that counts as its own."""
    places = dict(_WRITABLE)
    if not any(posixpath.commonpath((place, spec.workdir)) == place for place in places):
        places[spec.workdir] = f"mode=0755,uid={USER_UID},gid={USER_UID}"
    return [
        {
            "destination": place,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", f"size={spec.disk_bytes}", *rest.split(",")],
        }
        for place, rest in places.items()
    ]


def _bind(source: str, destination: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["bind", "ro", "nosuid", "nodev"]}
