"""One implementation, two faces: an `async def` becomes a method that blocks when called and is awaited through `.aio`.

All sandbox I/O happens on one event loop in one daemon thread (`loop()`). `method(...)` submits to it and blocks; `await
method.aio(...)` does the same without blocking the caller's own loop, and on the sandbox loop itself runs directly, without a
thread hop. Cancelling the awaiting task cancels the work.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_guard = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    """The running event loop that owns all sandbox I/O; started on first use."""
    global _loop
    if _loop is None:
        with _guard:
            if _loop is None:
                _loop = _start()
    return _loop


def _start() -> asyncio.AbstractEventLoop:
    started = asyncio.new_event_loop()
    threading.Thread(target=started.run_forever, name="sandmill-sandboxes", daemon=True).start()
    return started


def _forget() -> None:
    """A forked child has no loop thread; it starts its own when it needs one."""
    global _loop, _guard
    _loop, _guard = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def block_on(work: Coroutine[Any, Any, R]) -> R:
    """Runs `work` on the sandbox loop and waits for it. Raises RuntimeError on that loop's own thread, where it would wait forever."""
    home = loop()
    if asyncio._get_running_loop() is home:
        work.close()
        raise RuntimeError("this blocking call would stop the sandbox event loop it runs on; use its .aio form")
    call = _Call(home, work)
    home.call_soon_threadsafe(call.start)
    return call.result()


class _Call(Generic[R]):
    """One blocking call: a lock that the finished task releases. Half the cost of a concurrent future."""

    __slots__ = ("_done", "_home", "_task", "_work")

    def __init__(self, home: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, R]) -> None:
        self._home = home
        self._work = work
        self._task: asyncio.Task[R] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        """On the sandbox loop."""
        self._task = self._home.create_task(self._work)
        self._task.add_done_callback(self._finished)

    def result(self) -> R:
        """In the calling thread. An interrupt cancels the work and waits for its clean-up before it goes on its way."""
        try:
            self._done.acquire()
        except BaseException:
            self._home.call_soon_threadsafe(self._cancel)
            self._done.acquire()
            raise
        assert self._task is not None
        return self._task.result()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finished(self, task: asyncio.Task[R]) -> None:
        if not task.cancelled():
            task.exception()  # the calling thread raises it, or was interrupted and has its own to raise
        self._done.release()


async def hop(work: Coroutine[Any, Any, R]) -> R:
    """Awaits `work` on the sandbox loop from whatever loop this runs on."""
    home = loop()
    if asyncio.get_running_loop() is home:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))


async def in_thread(work: Callable[[], R], undo: Callable[[R], object] | None = None) -> R:
    """Runs blocking `work` beside the loop, and waits for its end even when cancelled: half-done, it would leave things behind.

    `undo` takes back what it came to when nobody is left to take it.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if future.done() and not future.cancelled() and future.exception() is None and undo is not None:
            undo(future.result())
        raise


class Dual(Generic[P, R]):
    """A bound operation: call it to block, await `.aio(...)` to not."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[P, Coroutine[Any, Any, R]]) -> None:
        self._work = work

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return block_on(self._work(*args, **kwargs))

    def aio(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """The same operation as an awaitable, usable from any event loop."""
        work = self._work(*args, **kwargs)
        return work if asyncio._get_running_loop() is _loop else hop(work)


class dual(Generic[S, P, R]):  # noqa: N801 - used as a decorator
    """Decorates an `async def` method; `obj.method` is then a `Dual`."""

    def __init__(self, work: Callable[Concatenate[S, P], Coroutine[Any, Any, R]]) -> None:
        self._work = work
        self.__doc__ = work.__doc__

    @overload
    def __get__(self, instance: None, owner: type[S]) -> dual[S, P, R]: ...
    @overload
    def __get__(self, instance: S, owner: type[S]) -> Dual[P, R]: ...
    def __get__(self, instance: S | None, owner: type[S]) -> dual[S, P, R] | Dual[P, R]:
        if instance is None:
            return self
        return Dual(cast("Callable[P, Coroutine[Any, Any, R]]", self._work.__get__(instance, owner)))


class dual_class(Generic[S, P, R]):  # noqa: N801 - used as a decorator
    """Like `dual`, for an `async def` that takes the class first."""

    def __init__(self, work: Callable[Concatenate[type[S], P], Coroutine[Any, Any, R]]) -> None:
        self._work = work
        self.__doc__ = work.__doc__

    def __get__(self, instance: S | None, owner: type[S]) -> Dual[P, R]:
        return Dual(cast("Callable[P, Coroutine[Any, Any, R]]", self._work.__get__(owner, type(owner))))
