"""What a sandbox was refused. In: each refusal as it happens. Out: a bounded list for a person, the same refusals counted together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

MOST_ENTRIES: Final = 256
_LONGEST_HOST: Final = 253


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of refusal. `host` was chosen inside the sandbox: print it as data."""

    host: str
    """A host name or an address; of what is no host name only the printable part of its beginning."""
    port: int
    """53 for a name that was looked up."""
    reason: str
    count: int = 1


class Refused(Exception):
    """This connection or query is not let through; `reason` for a person."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        self.reason = reason
        super().__init__(reason)


class BlockedLog:
    """At most MOST_ENTRIES kinds. Written on the egress loop, read from any thread."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, str], int] = {}
        self.dropped = 0
        """Refusals of further kinds, which are not kept."""

    def add(self, refused: Refused) -> None:
        """Counts one."""
        key = (printable(refused.host), refused.port, refused.reason)
        if key in self._counts or len(self._counts) < MOST_ENTRIES:
            self._counts[key] = self._counts.get(key, 0) + 1
        else:
            self.dropped += 1

    def entries(self) -> tuple[Blocked, ...]:
        """All of them, in the order of their first occurrence."""
        return tuple(self._entries())

    def _entries(self) -> Iterator[Blocked]:
        for (host, port, reason), count in list(self._counts.items()):
            yield Blocked(host=host, port=port, reason=reason, count=count)


def printable(text: str) -> str:
    """What of a hostile name can be shown."""
    return "".join(letter if letter.isprintable() and letter.isascii() else "?" for letter in text[:_LONGEST_HOST])
