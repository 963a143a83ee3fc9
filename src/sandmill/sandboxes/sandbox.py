"""A sandbox: somewhere to run commands that cannot reach anything else. In: a spec and files. Out: processes, results, file contents.

Every method blocks when called and has an `.aio` form to await (dual.py). What comes out of a sandbox was written by whoever ran in
it: bytes and names are data, never instructions, paths or text to trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from types import TracebackType
from typing import Final, Self

from sandmill.errors import SandboxCreateFailed, SandboxGone
from sandmill.sandboxes.backends.choice import choose, load
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.backends.native.channel import Channel
from sandmill.sandboxes.backends.native.node import Birth, Node, node
from sandmill.sandboxes.backends.seam import BackendName
from sandmill.sandboxes.commanding import Commanding
from sandmill.sandboxes.commands import Commands
from sandmill.sandboxes.dual import dual, dual_class
from sandmill.sandboxes.egress.blocked import Blocked
from sandmill.sandboxes.egress.handover import Handover
from sandmill.sandboxes.egress.outside import Outside
from sandmill.sandboxes.egress.proxy import EgressProxy
from sandmill.sandboxes.files import file_error, place
from sandmill.sandboxes.filing import Filing
from sandmill.sandboxes.images import HOST, Image, Use, resolve
from sandmill.sandboxes.lifetime import Lifetime
from sandmill.sandboxes.preserving import Preserving
from sandmill.sandboxes.registry import SandboxRecord
from sandmill.sandboxes.spec import Continuity, Egress, SandboxSpec, check_names

_READY_S: Final = 30.0
_LAST_WORDS_S: Final = 0.5
_LAST_WORDS_STEPS: Final = 50


class Sandbox(Filing, Preserving, Commanding):
    """A live sandbox. Made by `Sandbox.create` or `Sandbox.from_spec`, ended by `terminate`, a `with` block, or its limits."""

    def __init__(self, spec: SandboxSpec, owner: Node, image: Image = HOST, use: Use | None = None) -> None:
        self.id = f"sb-{secrets.token_hex(6)}"
        self.name = self.id
        """Opaque: any string; never used as a path."""
        self.labels: Mapping[str, str] = {}
        self.spec = spec
        self.lifetime = Lifetime(spec, asyncio.get_running_loop())
        self._node = owner
        self._birth: Birth | None = None
        self._agent: Agent | None = None
        self._gone: SandboxGone | None = None
        self._ending: asyncio.Task[None] | None = None
        self._egress: EgressProxy | None = None
        self._outside: Outside | None = None
        self._image, self._use = image, use

    @dual_class
    async def create(
        cls: type[Sandbox],  # noqa: N805 - a class comes first here
        *,
        cpu: float | str = 1,
        memory: int | str = "2Gi",
        disk: int | str = "1Gi",
        timeout: float | str = "24h",
        idle_timeout: float | str = "5m",
        max_cost: int | float | str | Decimal | None = None,
        price_per_hour: int | float | str | Decimal | None = None,
        network: Egress | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        image: str | Image | None = None,
        continuity: str = Continuity.EPHEMERAL,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        files: Mapping[str, bytes | str] | None = None,
        backend: str | None = None,
        server: str | None = None,
    ) -> Sandbox:
        """Creates a sandbox. `files` are written before it is handed out, by path relative to `workdir`.

        `image`: an Image, a name or digest in the store, `oci:PATH[:TAG]` or `docker-archive:PATH[:NAME]`; its variables, workdir and user
        hold where nothing else is said. None is this machine's own programs.

        `backend`: native (this machine's namespaces), gvisor, e2b, kubernetes or server; without it, SANDMILL_BACKEND, and without that,
        native. `server` is the URL of a Sandmill server to create it on; without it, SANDMILL_API_URL ("": none, whatever that says).

        Sizes are bytes or quantities (`"512Mi"`), durations seconds or Go durations (`"5m"`), costs dollars. `network`: none, or
        `Egress.allow("pypi.org", presets=["npm"])`, or `Egress.open()` (docs/network.md). Raises ConfigError, IsolationUnavailable (this
        machine cannot; nothing was started), ImageError, SandboxCreateFailed (nothing is left behind).
        """
        spec = SandboxSpec.of(
            cpu=cpu,
            memory=memory,
            disk=disk,
            timeout=timeout,
            idle_timeout=idle_timeout,
            max_cost=max_cost,
            price_per_hour=price_per_hour,
            network=network,
            env=env,
            workdir=workdir,
            image=image.digest if isinstance(image, Image) else image,
            continuity=continuity,
            backend=backend,
        )
        return await _create(cls, spec, files, name, labels, server)

    @dual_class
    async def from_spec(
        cls: type[Sandbox],  # noqa: N805 - a class comes first here
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes | str] | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        server: str | None = None,
        outside: Outside | None = None,
    ) -> Sandbox:
        """`create` from a resolved spec. `outside`: what lies beyond its egress, None for this machine's own network."""
        return await _create(cls, spec, files, name, labels, server, outside)

    @property
    def alive(self) -> bool:
        """False once it has ended for whatever reason."""
        return self._gone is None

    @property
    def gone_reason(self) -> str | None:
        """Why it ended, None while it lives."""
        return None if self._gone is None else self._gone.reason

    @property
    def lacks(self) -> str | None:
        """One sentence on what this machine could not give it, None when everything holds (`sandmill doctor` shows the fix)."""
        return self._node.lacks

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """What its network policy refused so far, at most 256 kinds; kept after its end. Names in it were chosen inside: data."""
        return () if self._egress is None else self._egress.blocked

    @dual
    async def list_blocked(self) -> tuple[Blocked, ...]:
        """`blocked`, for whoever must not wait: a sandbox on a server has to ask."""
        return self.blocked

    @dual
    async def ping(self) -> None:
        """Asks the sandbox for a sign of life. Raises SandboxGone."""
        await self._live().ask(wire.PING)

    @dual
    async def terminate(self) -> None:
        """Ends the sandbox; returns when no process, mount or file of it is left. Its control group is empty by then, and removed or, if
        nothing ever happened in it, kept for the next sandbox for some seconds. Idempotent, safe while cancelled."""
        await self.stop("terminated")
        await self.forget_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.terminate()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.terminate.aio()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {'alive' if self.alive else self.gone_reason!r}>"

    async def stop(self, reason: str, *, gently: bool = False) -> None:
        """Ends it for `reason`. `gently`: running commands are killed first and their output is kept. On the sandbox loop."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(reason, gently))
        await asyncio.shield(self._ending)

    def hand_out(self, name: str | None, labels: Mapping[str, str] | None) -> None:
        """Leaves its pool: named, and from now on it ages. On the sandbox loop."""
        self.name, self.labels = name or self.id, dict(labels or {})
        self._node.registry.add(self.id, self)
        self.lifetime.start(self)

    def record(self) -> SandboxRecord:
        """How it is listed."""
        return SandboxRecord(
            id=self.id,
            name=self.name,
            labels=self.labels,
            owner_pid=os.getpid(),
            age_s=self.lifetime.age_s,
            cpu=self.spec.cpu,
            memory_bytes=self.spec.memory_bytes,
            disk_bytes=self.spec.disk_bytes,
            workdir=self.spec.workdir,
        )

    async def begin(self, files: bytes, outside: Outside | None = None) -> None:
        """Comes to life. On the sandbox loop, once."""
        self._outside = outside
        with Handover(self.spec.network) as handover:
            await self._be_born(files, handover.theirs)
            self._egress = await handover.proxy(outside)

    async def _be_born(self, files: bytes, egress: socket.socket | None) -> None:
        base = self._image.base if self._image.layers else None
        self._birth = birth = await self._node.create(self.spec, files, base, egress)
        self._agent = agent = Agent(partial(Channel, asyncio.get_running_loop(), birth.agent), self._lost, self._hurry)
        ready = agent.expect_ready()
        self._commands = Commands(self.spec, rootless=self._node.rootless, image=self._image)  # worked out while the sandbox comes up
        try:
            async with asyncio.timeout(_READY_S):
                reply, _ = await ready
        except (TimeoutError, SandboxGone) as error:
            raise SandboxCreateFailed(f"a new sandbox did not come up: {error or 'no answer'}") from error
        if reply.status and reply.flags & wire.NOT_STARTED:
            raise SandboxCreateFailed(reply.status, f"could not create a sandbox: {reply.failure}")
        if reply.status:
            raise file_error(reply.status, reply.data.decode("utf-8", "replace"))
        self._node.proven = True

    async def _sibling(self, spec: SandboxSpec, image: Image, use: Use, name: str | None) -> Sandbox:
        return await _bear(type(self), self._node, spec, image, use, b"", name, self.labels, self._outside)

    async def _revive(self, spec: SandboxSpec, image: Image, use: Use | None) -> None:
        self.spec, self._image, self._use, self._frozen = spec, image, use, False
        self._birth = self._agent = self._gone = self._ending = None
        self.lifetime = Lifetime(spec, asyncio.get_running_loop())
        try:
            self._node = owner = await node()
            async with owner.creations:
                await self.begin(b"", self._outside)
        except BaseException:
            await self.stop("it could not be started again")
            raise
        self.hand_out(self.name, self.labels)

    async def _end(self, reason: str, gently: bool) -> None:
        self.lifetime.stop(reason)
        first = self._gone is None
        self._gone = self._gone or SandboxGone(self.name, reason)
        if gently and first and self._agent is not None:
            await self._end_commands(self._agent)
            if self.spec.continuity is Continuity.SNAPSHOTTED and self._birth is not None:
                await self.try_keep_files(self._agent)
        account = None if self._birth is None else await self._node.destroy(self._birth.slot)
        if not first and account is not None and account.oom_kills:
            self._gone = SandboxGone(self.name, "its init was killed for lack of memory")
        if self._agent is not None:
            self._agent.close(self._gone)
        if self._egress is not None:
            with contextlib.suppress(TimeoutError):
                await self._egress.close()
        self._node.registry.remove(self.id)
        if self._use is not None or self._last is not None:
            await self.let_go()

    async def _end_commands(self, agent: Agent) -> None:
        """Kills what runs and gives each command a moment to hand over its output."""
        for id in agent.commands:
            agent.kill_tree(id)
        for _ in range(_LAST_WORDS_STEPS):
            if not agent.commands:
                return
            await asyncio.sleep(_LAST_WORDS_S / _LAST_WORDS_STEPS)

    def _hurry(self, on: bool) -> None:
        if self._birth is not None:
            self._node.hurry(self._birth.slot, on, self.spec.cpu)

    def _lost(self, why: str) -> None:
        """The agent's end of the conversation closed without our asking."""
        if self._gone is None:
            self._gone = SandboxGone(self.name, why or ("its init process died" if self._node.alive else "the sandbox warden died"))
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(self._gone.reason, False))

    def _live(self) -> Agent:
        if self._gone is not None:
            raise SandboxGone(self._gone.sandbox, self._gone.reason)
        assert self._agent is not None
        self.lifetime.touch()
        return self._agent


async def _create(
    cls: type[Sandbox],
    spec: SandboxSpec,
    files: Mapping[str, bytes | str] | None,
    name: str | None,
    labels: Mapping[str, str] | None,
    server: str | None = None,
    outside: Outside | None = None,
) -> Sandbox:
    check_names(name, labels)
    chosen, url = choose(spec.backend, server)
    if chosen is BackendName.SERVER:
        from sandmill.sandboxes.backends.remote.sandbox import create_remote

        return await create_remote(url, spec, files, name, labels)
    if chosen is not BackendName.NATIVE:
        from sandmill.sandboxes.backends.guest.sandbox import create_guest

        return await create_guest(load(chosen), spec, files, name, labels)
    spec, image, use = await resolve(spec)
    try:
        payload = place(files or {}, spec.workdir)
        owner = await node()
    except BaseException:
        if use is not None:
            use.release()
        raise
    return await _bear(cls, owner, spec, image, use, payload, name, labels, outside)


async def _bear(
    cls: type[Sandbox],
    owner: Node,
    spec: SandboxSpec,
    image: Image,
    use: Use | None,
    payload: bytes,
    name: str | None,
    labels: Mapping[str, str] | None,
    outside: Outside | None,
) -> Sandbox:
    """A sandbox that lives, or nothing of it. Owns `use`."""
    async with owner.creations:
        sandbox = cls(spec, owner, image, use)
        try:
            await sandbox.begin(payload, outside)
        except BaseException:
            await sandbox.stop("creation failed")
            raise
    sandbox.hand_out(name, labels)
    return sandbox
