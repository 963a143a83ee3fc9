"""What one server is told at its start. In: the command line. Out: a frozen value with every default in one place."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sandmill.accounts.prices import PriceBook


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A server's settings."""

    folder: Path
    prices: PriceBook
    host: str = "127.0.0.1"
    port: int = 8420
    database: str | None = None
    """A PostgreSQL URL; None is SQLite in the folder."""
    certificate: Path | None = None
    """A TLS certificate chain (PEM); with it the server speaks https only."""
    certificate_key: Path | None = None
    max_running: int = 4096
    """Sandboxes of one project that may be up at once."""
    max_objects: int = 20_000
    """Objects of one kind that one project may have."""
    max_processes: int = 200
    """Commands of one sandbox that may run at once; as many ended ones are kept."""
    local_sandboxes: int = 10_000
    """Sandboxes that this machine may hold; 0: none, all go to nodes."""
    max_waiting: int = 10_000
    """Sandboxes that may wait for a place."""
    longest_wait_s: float = 30.0
    """How long one may wait for a place."""
    node_lease_s: float = 20.0
    """A node that cannot reach this server for so long ends its sandboxes; a little later they are taken for lost."""
