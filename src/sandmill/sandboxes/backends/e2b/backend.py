"""Sandboxes of a fleet that speaks the E2B protocol (E2B itself, AgentENV). In: specs, and where the fleet is: E2B_API_KEY, E2B_DOMAIN,
E2B_API_URL, E2B_SANDBOX_URL as the `e2b` package reads them. Out: machines.

An image is a template's name. Processor and memory are the template's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Final

from e2b import ALL_TRAFFIC, AsyncSandbox
from e2b.exceptions import AuthenticationException, RateLimitException, ServiceBusyException
from e2b.sandbox.sandbox_api import SandboxNetworkOpts

from sandmill.errors import IsolationUnavailable, SandboxCreateFailed
from sandmill.sandboxes.backends.e2b.machine import FAILURES, LEASE_S, SPARE_S, E2BMachine, said
from sandmill.sandboxes.backends.seam import BackendName, Hearing, Usable
from sandmill.sandboxes.spec import EgressMode, SandboxSpec

_CREATE_S: Final = 120.0
_PAUSE_S: Final = 0.5
_FIX: Final = "set E2B_API_KEY, and E2B_DOMAIN or E2B_API_URL for a fleet of your own"


class E2B:
    """A fleet."""

    name = BackendName.E2B
    text = True
    start_s = 180.0

    def lacks(self, spec: SandboxSpec) -> str | None:
        """What a template decides."""
        return "an E2B sandbox has the processors, memory and disk of its template, whatever was asked for"

    def check(self, spec: SandboxSpec) -> None:
        """Raises IsolationUnavailable without a key."""
        if not os.environ.get("E2B_API_KEY"):
            raise IsolationUnavailable(f"backend e2b has no key; {_FIX}")

    async def create(self, spec: SandboxSpec, guest: Sequence[str], hearing: Hearing) -> E2BMachine:
        """A microVM; waits while the fleet is at its limit."""
        making = asyncio.get_running_loop().create_task(self._box(spec))
        try:
            box = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_unwanted)  # the request is on its way: what it makes must not stay
            raise
        machine = E2BMachine(box, hearing, spec.timeout_s)
        try:
            await machine.start(guest)
        except BaseException:
            await asyncio.shield(machine.destroy())
            raise
        return machine

    async def usable(self) -> Usable:
        """Asks the fleet for its list of sandboxes, which costs nothing."""
        if not os.environ.get("E2B_API_KEY"):
            return Usable(ok=False, says="no key", fix=_FIX)
        try:
            await AsyncSandbox.list(limit=1, request_timeout=10.0).next_items()
        except FAILURES as error:
            return Usable(ok=False, says=f"the fleet does not answer as it should: {said(error)}", fix=_FIX)
        return Usable(ok=True, says="the fleet answers")

    async def _box(self, spec: SandboxSpec) -> AsyncSandbox:
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + _CREATE_S, _PAUSE_S
        while True:
            try:
                return await AsyncSandbox.create(
                    spec.image,
                    timeout=max(1, min(LEASE_S, round(spec.timeout_s) + SPARE_S)),
                    metadata={"sandmill": "sandbox"},
                    allow_internet_access=spec.network.mode is not EgressMode.DENY,
                    network=_network(spec),
                )
            except (RateLimitException, ServiceBusyException) as error:
                if loop.time() > deadline:
                    raise SandboxCreateFailed(f"the E2B fleet had no room for {_CREATE_S:.0f} s: {said(error)}") from error
                await asyncio.sleep(pause)
                pause = min(5.0, 2 * pause)
            except AuthenticationException as error:
                raise IsolationUnavailable(f"the E2B fleet refused the key: {said(error)}; {_FIX}") from error
            except FAILURES as error:
                raise SandboxCreateFailed(f"the E2B fleet made no sandbox: {said(error)}") from error


_ending: set[asyncio.Task[bool]] = set()


def _unwanted(making: asyncio.Task[AsyncSandbox]) -> None:
    if not making.cancelled() and making.exception() is None:
        end = asyncio.get_running_loop().create_task(making.result().kill())
        _ending.add(end)
        end.add_done_callback(_ended)


def _ended(end: asyncio.Task[bool]) -> None:
    _ending.discard(end)
    if not end.cancelled():
        end.exception()  # nobody waits for it; its lease ends what stays


def _network(spec: SandboxSpec) -> SandboxNetworkOpts | None:
    if spec.network.mode is not EgressMode.ALLOW:
        return None
    return {"allow_out": list(spec.network.patterns), "deny_out": [ALL_TRAFFIC]}
