"""The guest's executable, for backends whose machines do not see this machine's files. In: nothing. Out: its bytes."""

from __future__ import annotations

import os
from pathlib import Path

from sandmill.errors import IsolationUnavailable
from sandmill.sandboxes.backends.native.node import WARDEN


def guest_program() -> bytes:
    """This installation's, or for machines of another architecture the one that SANDMILL_GUEST names. Raises IsolationUnavailable."""
    path = Path(os.environ.get("SANDMILL_GUEST") or WARDEN)
    try:
        return path.read_bytes()
    except OSError as error:
        raise IsolationUnavailable(f"the sandbox guest {path} cannot be read: {error.strerror}; install sandmill again") from error
