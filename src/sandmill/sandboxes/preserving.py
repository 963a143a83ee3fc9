"""A sandbox's files beyond its own life: images of them, copies that start from them, a stop that keeps them; and standing still.

In: a live sandbox. Out: images, more sandboxes, the same one later. Files only: no process of the original lives on in a copy.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self, cast

from sandmill.errors import ImageError, SandboxError, SandboxGone
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.backends.native.agent import Agent
from sandmill.sandboxes.dual import dual, in_thread
from sandmill.sandboxes.images import HOST, Image, Use, settle, store
from sandmill.sandboxes.images.merging import merged
from sandmill.sandboxes.images.parts import take
from sandmill.sandboxes.images.store import KEPT
from sandmill.sandboxes.images.written import digest, seal
from sandmill.sandboxes.lifetime import Lifetime
from sandmill.sandboxes.process import exec_failed
from sandmill.sandboxes.spec import Continuity, SandboxSpec

if TYPE_CHECKING:
    from sandmill.sandboxes.sandbox import Sandbox

_FREEZE_S: Final = 5.0
_FORKING_AT_ONCE: Final = 16
_log = logging.getLogger("sandmill.sandboxes")


class Preserving(abc.ABC):
    """The part of `Sandbox` that outlasts it."""

    id: str
    name: str
    labels: Mapping[str, str]
    spec: SandboxSpec
    lifetime: Lifetime
    kept: Image | None = None
    """After a stop that kept its files: the image they are in, `stopped/<id>` in the store."""
    _image: Image = HOST
    _use: Use | None = None
    _frozen = False
    _last: Sealed | None = None
    _copying: asyncio.Lock | None = None

    @abc.abstractmethod
    def _live(self) -> Agent:
        """The agent. Raises SandboxGone."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """False once it has ended for whatever reason."""

    @property
    def image(self) -> Image:
        """What it started from."""
        return self._image

    @property
    def frozen(self) -> bool:
        """Whether `freeze` stopped its processes."""
        return self._frozen

    @dual
    async def snapshot_filesystem(self, name: str | None = None) -> Image:
        """An image of all its files as they are now, in the store under its digest and, if given, `name`; its processes stand still
        meanwhile and go on. Memory, /dev/shm and mounts of a running process are no part of it. Raises ImageError, SandboxGone.
        """
        image, use = await self._seal(self._live())
        try:
            await in_thread(lambda: store().save(image, name))
        finally:
            await in_thread(use.release)
        return image

    @dual
    async def fork(self, n: int, *, name: str | None = None) -> list[Sandbox]:
        """`n` new sandboxes that start from its files as they are now, which they share until they write. It lives on itself; none of
        its processes is copied. All or none: raises what `Sandbox.create` raises.
        """
        check_count(n)
        image, use = await self._seal(self._live())
        spec = settle(self.spec, image)
        try:
            return await all_or_none(n, name, lambda called: self._sibling(spec, image, use.share(), called))
        finally:
            await in_thread(use.release)

    @dual
    async def fork_parts(
        self, spec: SandboxSpec, paths: Sequence[str], *, never: Sequence[str] = (), top: str | None = None
    ) -> tuple[Sandbox, tuple[str, ...]]:
        """A new sandbox of limits `spec` that starts as this one did, with only what was written below `paths` since (see images/parts.py);
        and the names of what else was written. `top`: a layer of the store that lies above all. It lives on itself. Raises what
        `Sandbox.create` raises.
        """
        image, use = await self._seal(self._live())
        try:
            parts = await in_thread(lambda: take(image, self._image, paths, never, store(), top), lambda made: made.use.release())
        except OSError as error:
            raise ImageError(f"the files of sandbox {self.name} could not be taken over: {error.strerror}") from error
        finally:
            await in_thread(use.release)
        return await self._sibling(settle(spec, parts.image), parts.image, parts.use, None), parts.left

    @dual
    async def freeze(self) -> None:
        """Stops every process in it until `thaw`, by SIGSTOP. They keep their memory and use no processor; files can still be read and
        written, commands not be started. Idempotent. Raises SandboxGone.
        """
        async with self._alone():
            if not self._frozen:
                await self._answer(self._live(), wire.FREEZE)
                self._frozen = True

    @dual
    async def thaw(self) -> None:
        """Lets its processes go on. Idempotent. Raises SandboxGone."""
        async with self._alone():
            if self._frozen:
                await self._answer(self._live(), wire.THAW)
                self._frozen = False

    @dual
    async def halt(self, *, keep: bool | None = None) -> Image | None:
        """Ends it; with `keep` (None: as its continuity says) its files stay, for `start` or, as image `stopped/<id>`, for any other
        sandbox. Raises ImageError when they could not be kept, and then it lives on.
        """
        if self.alive and (self.spec.continuity is Continuity.SNAPSHOTTED if keep is None else keep):
            await self.keep_files(self._live())
        await cast("Sandbox", self).stop("stopped")
        return self.kept

    @dual
    async def start(self) -> Self:
        """After a stop: the same sandbox again, empty or with the files that were kept. Raises SandboxError while it is alive."""
        async with self._alone():
            if self.alive:
                raise SandboxError(f"sandbox {self.name} is running; stop it first")
            await cast("Sandbox", self).stop("stopped")  # whoever ends it may not be done yet
            image, kept = self.kept or self._image, self.kept
            use = await in_thread(lambda: store().use(image)) if image.layers else None
            await self._revive(settle(self.spec, image) if image.layers else self.spec, image, use)
            if kept is not None:
                self.kept = None
                await in_thread(lambda: store().unname(KEPT + self.id))
        return self

    async def keep_files(self, agent: Agent) -> None:
        """Seals its files as `stopped/<id>`, its processes dead. On the sandbox loop. Raises ImageError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FREEZE_S):
                await agent.ask(wire.KILL_ALL)
        image, use = await self._seal(agent)
        try:
            await in_thread(lambda: store().save(image, KEPT + self.id))
        finally:
            await in_thread(use.release)
        self.kept = image

    async def try_keep_files(self, agent: Agent) -> None:
        """For a limit that ends it: whatever happens, it ends."""
        try:
            await self.keep_files(agent)
        except SandboxError as error:
            _log.warning("the files of sandbox %s could not be kept: %s", self.id, error)

    async def forget_files(self) -> None:
        """What a stop kept is no longer wanted."""
        if self.kept is not None:
            self.kept = None
            await in_thread(lambda: store().unname(KEPT + self.id))

    async def let_go(self) -> None:
        """Its end: the layers that it held may go."""
        use, self._use = self._use, None
        if use is not None:
            await in_thread(use.release)
        await self._let_go_of_last()

    async def _let_go_of_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            await in_thread(last.use.release)

    async def _startable(self) -> Agent:
        """Where a command may start now; while its files are copied, none does. Raises SandboxGone, ExecFailed."""
        if self._frozen or self._copying is not None:
            async with self._alone():
                if self._frozen:
                    raise exec_failed(errno.EBUSY)
        return self._live()

    @abc.abstractmethod
    async def _sibling(self, spec: SandboxSpec, image: Image, use: Use, name: str | None) -> Sandbox:
        """Another sandbox beside this one. Owns `use`."""

    @abc.abstractmethod
    async def _revive(self, spec: SandboxSpec, image: Image, use: Use | None) -> None:
        """Begins anew under the same name. Owns `use`."""

    async def _seal(self, agent: Agent) -> tuple[Image, Use]:
        """An image of its files, pinned. Not recorded in the store."""
        self.lifetime.enter()
        try:
            async with self._alone(), self._still(agent):
                written = await self._answer(agent, wire.WRITTEN)
                if written < 0:
                    raise ImageError(f"sandbox {self.name} did not hand out its files")
                sealed = await in_thread(lambda: self._seal_again(written))
                return sealed.image, sealed.use.share()
        finally:
            self.lifetime.leave()
            if not self.alive:  # it ended meanwhile, and let go of what it held then
                await self._let_go_of_last()

    def _seal_again(self, written: int) -> Sealed:
        """In a thread of its own. What it came to is held from here on, whether or not anyone still waits for it."""
        last = self._last
        self._last = sealed = _sealed(written, self._image, last)
        if last is not None and last is not sealed:
            last.use.release()
        return sealed

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """No other copying, freezing or thawing, and no command starts."""
        self._copying = lock = self._copying or asyncio.Lock()
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._copying = None

    @contextlib.asynccontextmanager
    async def _still(self, agent: Agent) -> AsyncIterator[None]:
        """Frozen for a moment, unless it is frozen anyway."""
        if self._frozen:
            yield
            return
        await self._answer(agent, wire.FREEZE)
        try:
            yield
        finally:
            with contextlib.suppress(SandboxGone):
                await self._answer(agent, wire.THAW)

    async def _answer(self, agent: Agent, op: int) -> int:
        """The descriptor of the answer, -1 when there is none."""
        try:
            async with asyncio.timeout(_FREEZE_S):
                return (await agent.ask(op))[1]
        except TimeoutError:
            raise SandboxError(f"sandbox {self.name} did not answer within {_FREEZE_S:.0f} s") from None


def check_count(n: int) -> None:
    """Raises ImageError for a number of forks that makes no sense."""
    if n < 1:
        raise ImageError(f"a sandbox can be forked into one or more, not {n}")


async def all_or_none(n: int, name: str | None, make: Callable[[str | None], Awaitable[Sandbox]]) -> list[Sandbox]:
    """`n` siblings, called `name-0` and so on where there is a name; a failure ends those that were made."""
    room = asyncio.Semaphore(_FORKING_AT_ONCE)
    made: list[Sandbox] = []

    async def one(number: int) -> None:
        async with room:
            made.append(await make(None if name is None else f"{name}-{number}"))

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(n):
                group.create_task(one(number))
    except BaseException as error:
        await asyncio.gather(*(sandbox.stop("its siblings could not be made") for sandbox in made))
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from error
        raise
    return made


class Sealed(NamedTuple):
    """What a sandbox's files were when last looked at: the digest of what it wrote, the image with that, and a hold on it."""

    written: str
    image: Image
    use: Use


def _sealed(written: int, image: Image, last: Sealed | None) -> Sealed:
    """Copying is all disk. `written` is closed. The last sealing again, if nothing changed since: then files are
    only read, and making the same files again and again is what a disk likes least.
    """
    place = store()
    try:
        if last is not None and digest(written) == last.written:
            return last
        sealed = seal(written, image, place)
    finally:
        os.close(written)
    flat = sealed
    try:
        flat = merged(sealed, place)
        return Sealed(sealed.layers[-1], flat, place.use(flat, fleeting=True))
    finally:
        place.unpin(sealed.layers[-1])
        if flat is not sealed:
            place.unpin(flat.layers[-1])
