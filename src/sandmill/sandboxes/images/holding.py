"""Files that processes share. In: paths of the image store. Out: locks that end with their holder, whole files or none."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import Final

from sandmill.errors import ImageError

LOCK_S: Final = 30.0
"""How long anyone waits for the store."""


def hold(path: Path) -> int:
    """A descriptor with a shared lock on a layer's record, sure that the layer was not removed in between."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
    except FileNotFoundError:
        pass
    raise ImageError(f"layer {path.stem[:12]} of the image was removed from the store; import or build the image again")


def is_free(lock: Path) -> bool:
    """Whether nobody holds the lock of a draft or of a layer's record."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def lock(path: Path) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ImageError(f"another process has held the image store {path.parent} for {LOCK_S:.0f} s; try again") from None
            time.sleep(0.002)
        else:
            return descriptor


def write(path: Path, data: bytes) -> None:
    """Entirely or not at all. A name that starts with a dot is nothing to any reader."""
    fresh = path.with_name(f".{secrets.token_hex(8)}")
    fresh.write_bytes(data)
    fresh.rename(path)
