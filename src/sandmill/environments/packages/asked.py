"""What can be asked for tasks, scores and sessions: a package in its sandbox, or a server of the user's own. Protocols only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from sandmill.environments.packages.protocol import Description, Members, Row, Score

M = TypeVar("M", bound=msgspec.Struct)


class AskedSession(Protocol):
    """Calls that share state, one after the other: an episode of several turns."""

    async def call(self, method: str, params: Mapping[str, Any], kind: type[M], *, timeout_s: float, seed: int | None = None) -> M:
        """Raises GraderFailed, TimeoutError."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class Asked(Protocol):
    """A live one. Every method raises GraderFailed and TimeoutError."""

    description: Description

    async def tasks(self, split: str, start: int, stop: int, *, timeout_s: float) -> tuple[Row, ...]: ...

    async def grade(self, row: msgspec.Raw, answer: str | None, context: Mapping[str, Any] | None = None, *, timeout_s: float) -> Score: ...

    async def grade_group(self, row: msgspec.Raw, members: Sequence[Mapping[str, Any] | msgspec.Raw], *, timeout_s: float) -> Members: ...

    def session(self) -> AskedSession: ...


class AskedService(Protocol):
    """Gives a live one as long as anyone asks."""

    async def worker(self) -> Asked: ...

    async def close(self) -> None: ...

    def another(self) -> AskedService | None:
        """A further one of the same, not started; None where there is just this one."""
        ...
