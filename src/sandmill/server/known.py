"""What is known of a node since this server started. In: beats. Out: where its sandboxes are in their lives there."""

from __future__ import annotations

import time

from sandmill.sandboxes.backends.remote.client import Client
from sandmill.server.beats import Beat


class Node:
    """One node, as far as it is known since this server started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.beat: Beat | None = None
        self.client: Client | None = None
        self.seen = time.monotonic()
        self.seen_s: float | None = None
        self.strange: set[str] = set()
        """Sandboxes of the last beat that this server knows nothing of."""
        self.missing: set[str] = set()
        """Sandboxes that the last beat should have named."""
        self.moving: set[str] = set()
        """Sandboxes that are being stopped because of a drain."""
        self.probed = False
        """Whether it is being seen if it still listens."""
        self.drain_ends: float | None = None
        """When those that cannot be saved are stopped too (monotonic)."""
