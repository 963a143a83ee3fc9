"""A sandbox that is up. In: commands that come and go. Out: whether it is busy, what it has cost so far, and when it must end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sandmill.config.quantities import parse_duration
from sandmill.sandboxes import Sandbox
from sandmill.server.costs import Meter, cost_status
from sandmill.server.records import Value, fine_stamp, seconds_of, stamp

IDLE: Final = "IdleTimeout"
LIFETIME: Final = "MaxLifetime"
CAP: Final = "MaxCostReached"
GONE: Final = "SandboxLost"
LOST: Final = "NodeLost"
_SHOWN_S: Final = 5.0
"""The cost of a running sandbox is shown in steps, so that two looks at an unchanged object are equal."""


class Live:
    """One run of one sandbox: from a start to the next stop. On the event loop only."""

    def __init__(self, value: Value, sandbox: Sandbox, meter: Meter, secrets: Mapping[str, bytes]) -> None:
        self.uid: str = value["metadata"]["uid"]
        self.project: str = value["metadata"]["namespace"]
        self.name: str = value["metadata"]["name"]
        self.sandbox = sandbox
        self.meter = meter
        self.secrets = secrets
        """Files below /run/secrets that it was given."""
        self.began = self.used = time.monotonic()
        self.began_s = self.used_s = time.time()
        self.busy = 0
        self._ended_s: float | None = None
        self.stopping: str | None = None
        """Why it is being stopped, once it is."""
        self.limit(value)

    def limit(self, value: Value) -> None:
        """Takes the limits from the object, at the start and whenever they change."""
        lifecycle = value["spec"]["lifecycle"]
        self._idle_s = parse_duration(lifecycle["idleTimeout"])
        born = seconds_of(value["metadata"]["creationTimestamp"])
        self.ends_s = born + parse_duration(lifecycle["maxLifetime"])

    def since(self, began_s: float) -> None:
        """It came up then (seconds since 1970), and was taken up again now."""
        self.began, self.began_s = time.monotonic() - max(0.0, time.time() - began_s), began_s

    def over(self, ended_s: float) -> None:
        """It is known to have been up until then, and is not any more."""
        self._ended_s = ended_s

    def touch(self) -> None:
        """It was used just now."""
        self.used, self.used_s = time.monotonic(), time.time()

    def enter(self) -> None:
        """A command runs."""
        self.busy += 1
        self.touch()

    def leave(self) -> None:
        """That command ended."""
        self.busy -= 1
        self.touch()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Something else than a command is done with it."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @property
    def seconds(self) -> float:
        """Since it came up, until now or its end."""
        if self._ended_s is not None:
            return max(0.0, self._ended_s - self.began_s)
        return time.monotonic() - self.began

    @property
    def cost_microusd(self) -> int | None:
        """All its runs until now."""
        return self.meter.total(self.seconds)

    def due(self, now: float, wall: float) -> str | None:
        """The reason to end, if there is one."""
        if not self.sandbox.alive:
            return GONE
        left = self.meter.seconds_left()
        if left is not None and now - self.began >= left:
            return CAP
        if wall >= self.ends_s:
            return LIFETIME
        if self._idle_s and not self.busy and now - self.used >= self._idle_s:
            return IDLE
        return None

    def status(self) -> dict[str, Any]:
        """What changes all the time: shown whenever the object is read, stored only at its turning points."""
        frozen = {"frozen": True} if self.sandbox.frozen else {}
        return {
            **frozen,
            "activity": "Busy" if self.busy else "Idle",
            "lastActivityTime": fine_stamp(self.used_s),
            "expirationTime": stamp(self.ends_s),
            "cost": cost_status(self.meter, self.seconds // _SHOWN_S * _SHOWN_S, running=True),
        }
