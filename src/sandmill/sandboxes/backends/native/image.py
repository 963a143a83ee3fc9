"""What every sandbox's root holds besides programs: /etc cut down to what programs read, and empty folders.

In: this machine's /etc. Out: a batch (wire.py) that the warden unpacks once. An allow-list: a file that is not named here is not
in any sandbox, whoever may read it on the host.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from sandmill.sandboxes.backends.native.wire import entry

PROGRAM_FOLDERS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY: Final = {
    "usr": 0o755,
    "proc": 0o555,
    "sys": 0o555,
    "dev": 0o755,
    "tmp": 0o1777,
    "run": 0o755,
    "run/lock": 0o1777,
    "var": 0o755,
    "var/tmp": 0o1777,
    "var/log": 0o755,
    "var/cache": 0o755,
    "var/lib": 0o755,
    "root": 0o700,
    "home": 0o755,
    "home/user": 0o755,
    "opt": 0o755,
    "srv": 0o755,
    "mnt": 0o755,
    "etc": 0o755,
}
_WRITTEN: Final = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "user:x:1000:1000::/home/user:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "machine-id": "",
    "fstab": "",
}
_COPIED: Final = (
    "alternatives",
    "bash.bashrc",
    "debian_version",
    "inputrc",
    "issue",
    "java-17-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "login.defs",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "profile",
    "protocols",
    "python3",
    "python3.11",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
_LARGEST_FILE_BYTES: Final = 1 << 20


class Entry(NamedTuple):
    """A file, a folder or a link (`data` is its target). `path` without a leading slash; `modified` in seconds since 1970, 0: now."""

    path: str
    mode: int
    data: bytes = b""
    modified: int = 0


def skeleton(root: Path = Path("/")) -> bytes:
    """The batch, every path below /skeleton."""
    return b"".join(entry(f"/skeleton/{one.path}", one.mode, one.data, modified=one.modified) for one in entries(root))


def entries(root: Path = Path("/")) -> Iterator[Entry]:
    """What `skeleton` holds, one after the other."""
    for name, mode in _EMPTY.items():
        yield Entry(name, stat.S_IFDIR | mode)
    yield Entry("var/run", stat.S_IFLNK, b"/run")
    for name in PROGRAM_FOLDERS:
        place = root / name
        if place.is_symlink():
            yield Entry(name, stat.S_IFLNK, os.fsencode(os.readlink(place)))
        elif place.is_dir():
            yield Entry(name, stat.S_IFDIR | 0o755)
    for name, text in _WRITTEN.items():
        yield Entry(f"etc/{name}", stat.S_IFREG | 0o644, text.encode())
    for name in _COPIED:
        yield from _copy(root / "etc" / name, f"etc/{name}")


def _copy(source: Path, target: str) -> Iterator[Entry]:
    """What the world may read of `source`; links stay links. Unreadable and odd things are left out."""
    try:
        info = source.lstat()
        if stat.S_ISLNK(info.st_mode):
            yield Entry(target, stat.S_IFLNK, os.fsencode(os.readlink(source)))
        elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size <= _LARGEST_FILE_BYTES:
            # A compiled Python file is used only where its source has the time it was compiled from.
            yield Entry(target, stat.S_IFREG | (info.st_mode & 0o755), source.read_bytes(), modified=int(info.st_mtime) & 0xFFFFFFFF)
        elif stat.S_ISDIR(info.st_mode) and info.st_mode & 0o005:
            yield Entry(target, stat.S_IFDIR | 0o755)
            for child in sorted(source.iterdir()):
                yield from _copy(child, f"{target}/{child.name}")
    except (FileNotFoundError, PermissionError):
        return
