"""Which session of a package asks what. In: ASK frames of its worker. Out: ANSWER frames, from the asker of the session's attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from sandmill.environments.access.broker import Asker, Broker, Heard, Told
from sandmill.environments.access.meter import Meter
from sandmill.environments.packages.door import refusal
from sandmill.environments.packages.frames import ANSWER, packed
from sandmill.errors import GraderFailed


class Asking:
    """The askers of a worker's sessions. On the sandbox loop, but for `begin`. `send` takes frames to the worker."""

    def __init__(self, broker: Broker | None, send: Callable[[bytes], None]) -> None:
        self._broker = broker
        self._send = send
        self._askers: dict[int, Asker] = {}

    def begin(self, session: int, meter: Meter | None) -> None:
        """From now on the session may ask, for the attempt whose meter it is; without one it may not."""
        if self._broker is not None and meter is not None:
            self._askers[session] = self._broker.asker(meter)

    @contextlib.asynccontextmanager
    async def of(self, session: int, meter: Meter | None) -> AsyncIterator[None]:
        """While a session of one call lasts."""
        self.begin(session, meter)
        try:
            yield
        finally:
            await asyncio.shield(self.end(session))

    def hear(self, session: int, number: int, body: bytes) -> None:
        """Answers a request, later. Raises GraderFailed for what the worker would not have sent."""
        head, _, content = body.partition(b"\n")
        try:
            heard = msgspec.structs.replace(msgspec.json.decode(head, type=Heard), body=content)
        except msgspec.MsgspecError as error:
            raise GraderFailed(f"it sent a request that is none: {error}") from error
        asker = self._askers.get(session)
        if asker is None:
            self._send(packed(ANSWER, 0, refusal(403, "nothing may be asked now: no grading is under way"), number))
        else:
            asker.hear(heard, partial(self._tell, number))

    def _tell(self, number: int, told: Told) -> None:
        head = msgspec.json.encode({"status": told.status, "kind": told.kind})
        self._send(packed(ANSWER, 0, head + b"\n" + told.body, number))

    async def settle(self, session: int) -> None:
        """Ends what the session still asks; it may ask again."""
        if (asker := self._askers.get(session)) is not None:
            await asker.close()

    async def end(self, session: int) -> None:
        """The session asks no more. Idempotent."""
        if (asker := self._askers.pop(session, None)) is not None:
            await asker.close()

    async def close(self) -> None:
        """All of them. Idempotent."""
        for session in tuple(self._askers):
            await self.end(session)
