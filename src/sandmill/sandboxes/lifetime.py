"""When a sandbox must end by itself: its lifetime, its dollar cap, or too long without use. In: a spec and the comings and goings of
commands. Out: one call of the sandbox's `stop` with the reason. One timer watches all sandboxes; using one costs two assignments.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final, Protocol

from sandmill.sandboxes.spec import SandboxSpec

_LOOK_S: Final = 0.1


class Stoppable(Protocol):
    """What a lifetime ends."""

    async def stop(self, reason: str, *, gently: bool = False) -> None: ...


class Lifetime:
    """One sandbox's clock. On the sandbox loop."""

    def __init__(self, spec: SandboxSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._spec = spec
        self._loop = loop
        self._busy = 0
        self._used = self._born = loop.time()
        self.stopping: str | None = None
        """The limit that is ending the sandbox, if one is."""

    def start(self, owner: Stoppable) -> None:
        """Starts the clock and the watch over it."""
        self._used = self._born = self._loop.time()
        _watch.add(self, owner)

    def stop(self, reason: str) -> None:
        """No more watching: the sandbox is ending."""
        _watch.remove(self)

    def touch(self) -> None:
        """The sandbox was used just now."""
        self._used = self._loop.time()

    def enter(self) -> None:
        """A command runs: the sandbox is not idle until `leave`."""
        self._busy += 1

    def leave(self) -> None:
        """That command ended."""
        self._busy -= 1
        self._used = self._loop.time()

    @property
    def age_s(self) -> float:
        """Seconds since it was handed out."""
        return self._loop.time() - self._born

    def verdict(self, now: float) -> str | None:
        """The reason to end, if there is one."""
        spec = self._spec
        if now - self._born >= spec.life_s:
            if spec.life_s < spec.timeout_s:
                return f"its cost reached the cap of ${(spec.max_cost_microusd or 0) / 1e6:g}"
            return f"its lifetime of {spec.timeout_s:g} s is over"
        if not self._busy and now - self._used >= spec.idle_timeout_s:
            return f"it was idle for {spec.idle_timeout_s:g} s"
        return None


class _Watch:
    """All clocks, looked at ten times a second while there are any."""

    def __init__(self) -> None:
        self._clocks: dict[Lifetime, Stoppable] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stops: set[asyncio.Task[None]] = set()

    def add(self, clock: Lifetime, owner: Stoppable) -> None:
        self._clocks[clock] = owner
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def remove(self, clock: Lifetime) -> None:
        self._clocks.pop(clock, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for clock, owner in list(self._clocks.items()):
            if reason := clock.verdict(now):
                clock.stopping = reason
                del self._clocks[clock]
                stop = loop.create_task(owner.stop(reason, gently=True))
                self._stops.add(stop)
                stop.add_done_callback(self._stops.discard)
        self._timer = loop.call_later(_LOOK_S, self._look) if self._clocks else None


_watch = _Watch()


def _forget() -> None:
    """A forked child owns no sandboxes, and its loop is another."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_forget)
