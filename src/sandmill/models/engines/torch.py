"""The embedded engine: sessions from any asyncio loop in, samples out; the arithmetic runs on one thread of its own.

Contexts are admitted as they arrive, between decode steps; a session keeps its cache row across turns; `publish` takes effect
between two tokens, and every token carries the version it was sampled under.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sandmill.errors import ContextFull, EngineDied
from sandmill.models.decoder import Decoder, Ints, decoder_for
from sandmill.models.engines.decode_loop import DecodeLoop, Request
from sandmill.models.hidden import HiddenStates
from sandmill.models.loading import LoadedModel
from sandmill.models.model import Sample, Sampling

_SWITCH_INTERVAL_S = 5e-4
"""The decode thread takes the interpreter lock about a hundred times a token; at Python's default of 5 ms one busy event loop would
slow it fiftyfold."""


class TorchSession:
    """One row of the engine. After a cancelled `sample` it can only be closed."""

    def __init__(self, engine: TorchEngine, row: int) -> None:
        self._engine = engine
        self._row = row
        self._length = 0
        self._usable = True

    async def sample(self, context_ids: Sequence[int], sampling: Sampling) -> Sample:
        """See `Session.sample`."""
        self._engine.check()
        if not self._usable:
            raise RuntimeError("this session is closed, or its last sample was cancelled or is still running")
        length = self._length + len(context_ids)
        if length >= self._engine.context_length:
            raise ContextFull(f"{length} tokens leave no room to sample in a context of {self._engine.context_length}")
        if length == 0:
            raise ValueError("the first context of a session cannot be empty")
        if sampling.max_new_tokens < 1:
            raise ValueError("max_new_tokens must be at least 1")
        ids = np.asarray(context_ids, np.int64).reshape(-1)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self._engine.vocabulary_size):
            raise ValueError(f"a context id lies outside the vocabulary of {self._engine.vocabulary_size}")
        self._usable = False
        sample = await self._engine._submit(self._row, ids, sampling, fresh=self._length == 0)
        self._length = length + len(sample.token_ids)
        self._usable = True
        return sample

    async def close(self) -> None:
        """See `Session.close`."""
        row, self._row, self._usable = self._row, -1, False
        if row >= 0:
            self._engine._return_row(row)


class TorchEngine:
    """A `Model` over a loaded model. `rows` sessions at once; `context_length` defaults to the model's own, at most 1024.

    `threads` sets torch's threads for the decode thread, rounded down to a power of two: other splits leave vector remainders,
    whose last bits differ. `decoder` replaces the arithmetic. `hidden` (a policy's `hidden_states`) is given what sessions computed
    below the adapter, after every reply, and cleared by `publish`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        rows: int,
        context_length: int | None = None,
        threads: int | None = None,
        version: int = 0,
        decoder: Decoder | None = None,
        hidden: HiddenStates | None = None,
    ) -> None:
        self._context_length = min(context_length or 1024, loaded.context_length)
        self.vocabulary_size = int(loaded.model.config.vocab_size)
        self._version = version
        self._decoder = decoder or decoder_for(
            loaded.model, rows=rows, context_length=self._context_length, split=None if hidden is None else hidden.split
        )
        self._lock = threading.Condition()
        self._inbox: deque[Callable[[DecodeLoop], None]] = deque()
        self._free = list(range(rows))
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[int]]] = deque()
        self._pending: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Sample]]] = {}
        self._finished: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Sample], Sample]]] = {}
        self._death: EngineDied | None = None
        self._closing = False
        self._threads = None if threads is None else 1 << (max(1, threads).bit_length() - 1)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        loop = DecodeLoop(self._decoder, rows=rows, context_length=self._context_length, version=version, hidden=hidden)
        self._thread = threading.Thread(target=self._run, args=(loop,), name="sandmill-decode", daemon=True)
        self._thread.start()

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def version(self) -> int:
        return self._version

    async def session(self, *, seed: int) -> TorchSession:
        """See `Model.session`. Raises EngineDied."""
        with self._lock:
            self.check()
            future: asyncio.Future[int] | None = None
            if self._free and not self._waiters:
                row = heapq.heappop(self._free)
            else:
                running = asyncio.get_running_loop()
                future = running.create_future()
                self._waiters.append((running, future))
        if future is not None:
            try:
                row = await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._give(future.result())
                raise
        self._tell(lambda decoding: decoding.open(row, seed))
        return TorchSession(self, row)

    def publish(self, version: int) -> None:
        """Makes the current weights those of every token sampled from now on. Returns when they are; raises EngineDied."""
        applied = threading.Event()

        def apply(decoding: DecodeLoop) -> None:
            decoding.publish(version)
            self._version = version
            applied.set()

        with self._lock:
            self.check()
            self._inbox.append(apply)
            self._lock.notify()
        while not applied.wait(0.1):
            if not self._thread.is_alive():
                self.check()
                raise EngineDied("the engine ended before the new weights were in place")

    async def close(self) -> None:
        """Ends the decode thread; pending samples fail with EngineDied. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        await asyncio.shield(asyncio.to_thread(self._thread.join))

    async def _submit(self, row: int, ids: Ints, sampling: Sampling, *, fresh: bool) -> Sample:
        running = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = running.create_future()

        def finish(sample: Sample) -> None:
            self._pending.pop(row, None)
            self._finished.setdefault(running, []).append((future, sample))

        request = Request(row=row, ids=ids, sampling=sampling, finish=finish, fresh=fresh)
        with self._lock:
            self.check()
            self._pending[row] = (running, future)
            self._inbox.append(lambda decoding: decoding.admit(request))
            self._lock.notify()
        return await future

    def _return_row(self, row: int) -> None:
        """The row is free again once the decode thread has let go of it."""

        def release(decoding: DecodeLoop) -> None:
            decoding.drop(row)
            self._pending.pop(row, None)
            self._give(row)

        with self._lock:
            self._inbox.append(release)
            self._lock.notify()

    def _give(self, row: int) -> None:
        """Hands a free row to the longest waiting session, or keeps it."""
        with self._lock:
            while self._waiters:
                loop, future = self._waiters.popleft()
                if self._call(loop, functools.partial(self._grant, future, row)):
                    return
            heapq.heappush(self._free, row)

    def _grant(self, future: asyncio.Future[int], row: int) -> None:
        if future.done():
            self._give(row)
        else:
            future.set_result(row)

    def _tell(self, message: Callable[[DecodeLoop], None]) -> None:
        with self._lock:
            self.check()
            self._inbox.append(message)

    def check(self) -> None:
        """Raises EngineDied when the engine ended."""
        if self._death is not None:
            raise EngineDied(str(self._death)) from self._death.__cause__
        if self._closing:
            raise EngineDied("the engine was closed")

    def _run(self, decoding: DecodeLoop) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        death = EngineDied("the engine was closed while a sample was pending")
        try:
            while self._take(decoding):
                decoding.round()
                self._wake()
        except BaseException as error:  # noqa: BLE001 - whatever ended the thread must reach every waiter
            death = EngineDied(f"the inference engine ended: {type(error).__name__}: {error}")
            death.__cause__ = error
        self._die(death)

    def _take(self, decoding: DecodeLoop) -> bool:
        """Applies what has arrived, in order; waits when there is nothing to do. False when the engine is closing."""
        with self._lock:
            while not self._inbox and decoding.idle and not self._closing:
                self._lock.wait()
            if self._closing:
                return False
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            message(decoding)
        return True

    def _wake(self) -> None:
        """One wake-up per event loop for all replies finished in this round."""
        finished, self._finished = self._finished, {}
        for loop, results in finished.items():
            self._call(loop, functools.partial(_resolve, results))

    def _die(self, death: EngineDied) -> None:
        with self._lock:
            self._death = death
            pending: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = [*self._pending.values(), *self._waiters]
            self._pending.clear()
            self._waiters.clear()
            self._inbox.clear()
        self._wake()
        for loop, future in pending:
            self._call(loop, functools.partial(_fail, future, death))

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
        """False when the loop is closed: nobody waits there any more."""
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True


def _resolve(results: list[tuple[asyncio.Future[Sample], Sample]]) -> None:
    for future, sample in results:
        if not future.done():
            future.set_result(sample)


def _fail(future: asyncio.Future[Any], death: EngineDied) -> None:
    if not future.done():
        future.set_exception(EngineDied(str(death)).with_traceback(None))
