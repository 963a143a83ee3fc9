"""The server's memory on disk. In: writes, in order. Out: futures that resolve once they are durable; reads; what was there at the start.

One thread owns the connection and commits whatever has gathered as one transaction (group commit), so the event loop never waits
for a disk. SQLite (WAL) lives in the state folder; PostgreSQL is given by URL. Only one server may use either at a time.
A failed commit is tried again until it succeeds: memory is ahead of the disk then, new writes are refused, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sql

from sandmill.errors import ConfigError, StateBusy, StateIncompatible, StoreUnavailable
from sandmill.server import tables
from sandmill.server.tables import Answer, Change, Note, Piece, Write

_RETRY_S: Final = 0.5
_PATIENCE_S: Final = 5.0
_MOST_AT_ONCE: Final = 2000
_PRUNE_EVERY: Final = 500
_ADVISORY_LOCK: Final = 0x5A4D_1115
_log = logging.getLogger("sandmill.server")
R = TypeVar("R")


class Loaded(NamedTuple):
    """What was stored when the server started. Changes and answers are the oldest first."""

    objects: list[Change]
    changes: list[Change]
    answers: list[Answer]
    notes: dict[str, str]


class _Job(NamedTuple):
    writes: Sequence[Write]
    read: Callable[[sql.Connection], Any] | None
    done: asyncio.Future[Any]


class Store:
    """An open database. Made by `Store.open`, on the event loop that will await it."""

    def __init__(self, engine: sql.Engine, lock: int, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._lock = lock
        self._loop = loop
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._guard: sql.Connection | None = None
        place = engine.url.database if engine.dialect.name == "sqlite" else None
        self._wal = None if place is None else f"{place}-wal"
        self.trouble: str | None = None
        """Why writes fail at present, None while they do not."""
        self._written = self._version = self._answered = 0
        self._thread = threading.Thread(target=self._work, name="sandmill-store", daemon=True)

    @classmethod
    def open(cls, folder: Path, url: str | None, loop: asyncio.AbstractEventLoop, *, empty: bool = False) -> tuple[Store, Loaded]:
        """Raises StateBusy, StateIncompatible, StoreUnavailable, ConfigError for a URL of another kind. `empty`: forgets what was there."""
        lock = _lock_folder(folder)
        try:
            for old in folder.glob("server.db*") if empty else ():
                old.unlink()
            engine = _engine(folder, url, careless=empty)
            store = cls(engine, lock, loop)
            loaded = store._start()
        except sql.exc.SQLAlchemyError as error:
            os.close(lock)
            raise StoreUnavailable(f"the server's database cannot be used: {_first_line(error)}") from error
        except BaseException:
            os.close(lock)
            raise
        return store, loaded

    def submit(self, writes: Sequence[Write]) -> asyncio.Future[Any]:
        """Queues writes; the future resolves when they are durable. On the event loop."""
        done: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put(_Job(writes, None, done))
        return done

    async def commit(self, writes: Sequence[Write]) -> None:
        """`submit`, and waits. Raises StoreUnavailable when that takes too long; the writes then still happen as soon as they can."""
        await self.durable(self.submit(writes))

    async def read(self, ask: Callable[[sql.Connection], R]) -> R:
        """Runs a query after everything queued so far."""
        done: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put(_Job((), ask, done))
        found: R = await self.durable(done)
        return found

    def sync(self) -> None:
        """What was committed until now survives a power cut too. Blocks, beside the thread that commits. PostgreSQL sees to that itself."""
        if self._wal is not None:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(self._wal, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        """Writes what is queued and ends, within some seconds. Idempotent."""
        self._queue.put(None)
        self._thread.join(_PATIENCE_S)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def durable(self, done: asyncio.Future[R]) -> R:
        """Waits for a future of `submit`. Raises StoreUnavailable after some seconds; what was queued still happens."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(done)
        except TimeoutError:
            raise StoreUnavailable(self.trouble or "the server's database does not answer") from None

    def _start(self) -> Loaded:
        with self._engine.begin() as connection:
            tables.prepare(connection)
        if not self._take_database():
            raise StateBusy("another server uses this database; stop it first, or give this one a database of its own")
        with self._engine.begin() as connection:
            loaded = _load(connection)
        self._thread.start()
        return loaded

    def _take_database(self) -> bool:
        """Holds PostgreSQL for this server, for as long as one connection lives; taken again after that was lost."""
        if self._engine.dialect.name != "postgresql":
            return True
        if self._guard is not None:
            try:
                self._guard.execute(sql.text("select 1"))
                self._guard.commit()
            except sql.exc.SQLAlchemyError:
                self._guard.invalidate()
                self._guard = None
            else:
                return True
        guard = self._engine.connect()
        taken = bool(guard.execute(sql.text(f"select pg_try_advisory_lock({_ADVISORY_LOCK})")).scalar())
        guard.commit()
        if taken:
            self._guard = guard
        else:
            guard.close()
        return taken

    def _work(self) -> None:
        with self._engine.connect() as connection:
            while (job := self._queue.get()) is not None:
                batch, count = [job], len(job.writes)
                while job.read is None and count < _MOST_AT_ONCE:
                    try:
                        job = self._queue.get_nowait()
                    except queue.Empty:
                        break
                    if job is None:
                        self._queue.put(None)
                        break
                    batch.append(job)
                    count += len(job.writes)
                connection = self._carry_out(connection, batch)
        if self._guard is not None:
            self._guard.close()
        self._engine.dispose()

    def _carry_out(self, connection: sql.Connection, batch: list[_Job]) -> sql.Connection:
        writes = [write for job in batch for write in job.writes]
        while True:
            try:
                with connection.begin():
                    tables.carry_out(connection, writes)
                    self._prune(connection, writes)
                    answers = [None if job.read is None else job.read(connection) for job in batch]
                break
            except sql.exc.SQLAlchemyError as error:
                self.trouble = f"the server cannot write its state: {_first_line(error)}"
                _log.error("%s; trying again", self.trouble)
                connection.invalidate()
                connection.close()
                connection = self._again()
        self.trouble = None
        self._loop.call_soon_threadsafe(_settle, [job.done for job in batch], answers)
        return connection

    def _again(self) -> sql.Connection:
        """A fresh connection, once there can be one; not while another server has taken the database meanwhile."""
        while True:
            time.sleep(_RETRY_S)
            try:
                if self._take_database():
                    return self._engine.connect()
                self.trouble = "another server has taken this server's database while the connection was lost"
            except sql.exc.SQLAlchemyError as error:
                self.trouble = f"the server cannot reach its database: {_first_line(error)}"

    def _prune(self, connection: sql.Connection, writes: Sequence[Write]) -> None:
        self._written += len(writes)
        self._version = max((w.version for w in writes if isinstance(w, Change)), default=self._version)
        self._answered = max((w.number for w in writes if isinstance(w, Answer)), default=self._answered)
        if self._written >= _PRUNE_EVERY:
            self._written = 0
            tables.prune(connection, self._version, self._answered)


def pieces_of(process: str) -> Callable[[sql.Connection], list[Piece]]:
    """A query for a process's output."""

    def ask(connection: sql.Connection) -> list[Piece]:
        table = tables.output
        rows = connection.execute(sql.select(table).where(table.c.process == process).order_by(table.c.number))
        return [Piece(row.process, row.number, row.stream, bytes(row.data)) for row in rows]

    return ask


def sealed_of(uid: str, version: int) -> Callable[[sql.Connection], bytes | None]:
    """A query for one version of a Secret's values."""

    def ask(connection: sql.Connection) -> bytes | None:
        table = tables.secrets
        found = connection.execute(sql.select(table.c.sealed).where((table.c.uid == uid) & (table.c.version == version))).scalar()
        return None if found is None else bytes(found)

    return ask


def _settle(futures: list[asyncio.Future[Any]], answers: list[Any]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def _load(connection: sql.Connection) -> Loaded:
    stored = connection.execute(sql.select(tables.objects).order_by(tables.objects.c.version))
    logged = connection.execute(sql.select(tables.changes).order_by(tables.changes.c.version))
    answered = connection.execute(sql.select(tables.answers).order_by(tables.answers.c.number))
    noted = connection.execute(sql.select(tables.notes))
    return Loaded(
        [Change(r.version, "ADDED", r.kind, r.project, r.name, r.uid, r.body.encode()) for r in stored],
        [Change(r.version, r.event, r.kind, r.project, r.name, "", r.body.encode()) for r in logged],
        [Answer(r.owner, r.key, r.number, r.digest, r.status, r.body.encode()) for r in answered],
        {r.key: r.value for r in noted},
    )


def _lock_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "server.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"the state folder {folder} cannot be used: {error.strerror}; choose another with --state") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StateBusy(f"another server uses the state folder {folder}; stop it first, or choose another with --state") from None
    return lock


def _engine(folder: Path, url: str | None, *, careless: bool = False) -> sql.Engine:
    """`careless`: nobody will read it after a crash, so the disk is not waited for."""
    if url is None:
        engine = sql.create_engine(f"sqlite:///{folder / 'server.db'}", connect_args={"check_same_thread": False, "timeout": 10})
        sql.event.listen(engine, "connect", lambda connection, _: _tune(connection, "OFF" if careless else "NORMAL"))
        return engine
    scheme = url.split(":", 1)[0]
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ConfigError(
            "a database is given as postgresql://USER@HOST/NAME; without one, SQLite is used in the state folder", field="--database"
        )
    address = "postgresql+psycopg" + url.removeprefix(scheme)
    try:
        return sql.create_engine(address, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    except (sql.exc.ArgumentError, ValueError) as error:
        raise ConfigError("the database's URL cannot be understood; write postgresql://USER@HOST/NAME", field="--database") from error


def _tune(connection: Any, synchronous: str) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # Without a wait for the disk a commit is some milliseconds faster for every command; see `sync`.
    cursor.execute(f"PRAGMA synchronous={synchronous}")
    cursor.close()


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None else error
    return str(cause).splitlines()[0][:300] if str(cause) else type(cause).__name__


__all__ = ["Answer", "Change", "Loaded", "Note", "Piece", "StateIncompatible", "Store", "pieces_of", "sealed_of"]
