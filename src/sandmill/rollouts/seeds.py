"""Seeds: every random choice of a run derives from its seed and the place where it is made, never from order or time."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 64-bit seed from the named place, e.g. `derive(run_seed, "episode", step, group, index, attempt)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
