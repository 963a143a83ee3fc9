"""Words of the resource API. In: specs, commands, users. Out: JSON as the API takes it; and entries of folders from its answers."""

from __future__ import annotations

import base64
import errno
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from sandmill.errors import ConfigError, ExecFailed
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.commands import checked
from sandmill.sandboxes.files import FileEntry
from sandmill.sandboxes.process import exec_failed
from sandmill.sandboxes.spec import Continuity, EgressMode, SandboxSpec

_LONGEST_WORD: Final = 131_071
"""What Linux takes."""
_KINDS: Final = {"File": "file", "Directory": "folder", "Symlink": "link"}
_POLICIES: Final = {EgressMode.DENY: "Deny", EgressMode.ALLOW: "AllowList", EgressMode.OPEN: "Open"}


def creation(spec: SandboxSpec) -> dict[str, Any]:
    """A spec as the API takes it. The end of its time or money is the end of the sandbox, as on this machine, unless its files are kept."""
    egress: dict[str, Any] = {"policy": _POLICIES[spec.network.mode]}
    if spec.network.hosts:
        egress["allow"] = list(spec.network.hosts)
    if spec.network.presets:
        egress["presets"] = list(spec.network.presets)
    on_idle = "Delete" if spec.continuity is Continuity.EPHEMERAL else "Stop"
    out: dict[str, Any] = {
        "resources": {"cpu": f"{round(spec.cpu * 1000)}m", "memory": str(spec.memory_bytes), "disk": str(spec.disk_bytes)},
        "network": {"egress": egress},
        "lifecycle": {
            "idleTimeout": _duration(spec.idle_timeout_s),
            "onIdle": on_idle,
            "maxLifetime": _duration(spec.timeout_s),
        },
        "continuity": {"mode": spec.continuity.value},
    }
    if spec.workdir:
        out["workingDir"] = spec.workdir
    if spec.env:
        out["env"] = [{"name": key, "value": value} for key, value in spec.env.items()]
    if spec.image is not None:
        out["image"] = spec.image
    if spec.max_cost_microusd is not None:
        out["maxCostUSD"] = format(Decimal(spec.max_cost_microusd) / 1_000_000, "f")
    return out


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def words(argv: tuple[str | bytes, ...]) -> list[str]:
    """A command as JSON can carry it. Raises ExecFailed for what execve could not, ConfigError for what JSON cannot."""
    try:
        words = [word if isinstance(word, str) else word.decode() for word in checked(argv)]
    except UnicodeDecodeError as error:
        raise ConfigError("a command for a server is text; put other bytes into a file", field="argv") from error
    if not words or any("\0" in word for word in words):
        raise ExecFailed(errno.EINVAL, "a command needs a program, and no argument may contain NUL")
    if any(len(wire.encode(word)) > _LONGEST_WORD for word in words):
        raise exec_failed(errno.E2BIG, words[0])
    return words


def user_word(user: str) -> str:
    """Raises ConfigError."""
    if user not in ("user", "root"):
        raise ConfigError(f"user must be 'user' or 'root' (inside the sandbox), not {user!r}", field="user")
    return user


def entry(item: Mapping[str, Any]) -> FileEntry:
    """An entry of a listing."""
    name = base64.b64decode(item["nameBytes"]).decode("utf-8", "surrogateescape") if "nameBytes" in item else str(item["name"])
    return FileEntry(name=name, kind=_KINDS.get(item["type"], "other"), size_bytes=int(item["size"]), mode=int(item["mode"]))
