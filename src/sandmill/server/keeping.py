"""What stops have kept of sandboxes: one archive each, in the server's folder. In: live sandboxes. Out: archives to start with again."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

from sandmill.errors import SandboxError
from sandmill.server import layer
from sandmill.server.live import Live
from sandmill.server.records import Value
from sandmill.server.statuses import condition

_log = logging.getLogger("sandmill.server")


class Keeping:
    """All kept folders of one server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "kept"

    def path(self, uid: str) -> Path:
        """Where the last stop has kept a sandbox's folder, or would."""
        return self._folder / f"{uid}.tar"

    def of(self, value: Value) -> Path | None:
        """What the last stop saved, None where nothing was or nothing is to be."""
        path = self.path(value["metadata"]["uid"])
        return path if value["spec"]["continuity"]["mode"] == "Snapshotted" and path.exists() else None

    async def save(self, live: Live) -> dict[str, Any]:
        """Saves a sandbox that is being stopped; the condition that says how that went."""
        try:
            size = await layer.save(live.sandbox, self.path(live.uid))
        except (SandboxError, OSError, TimeoutError) as error:
            _log.warning("the workspace of sandbox %s could not be saved: %s", live.name, error)
            return condition("StateSaved", "False", "SaveFailed", f"the workspace could not be saved: {error}")
        return condition("StateSaved", "True", "Stop", f"the workspace was saved, {size} bytes")

    def forget(self, uid: str) -> None:
        """The sandbox was deleted. Idempotent."""
        self.path(uid).unlink(missing_ok=True)

    def sweep(self, known: Set[str]) -> None:
        """Removes all but whole archives of the sandboxes (uids) that there are."""
        for left in self._folder.glob("*"):
            if left.suffix != ".tar" or left.stem not in known:
                left.unlink(missing_ok=True)
