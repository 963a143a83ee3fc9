"""What is stored, as tables. In: an engine. Out: the schema, made or checked; and batches of writes carried out in one transaction.

One version number covers all tables. A database of another version is refused, never migrated in passing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from sandmill.errors import StateIncompatible

SCHEMA_VERSION: Final = 1
KEPT_CHANGES: Final = 10_000
"""Changes a watcher can go back. Older versions are answered with Expired, and the watcher lists again."""
KEPT_ANSWERS: Final = 10_000
_metadata = sql.MetaData()
notes = sql.Table("notes", _metadata, sql.Column("key", sql.String(64), primary_key=True), sql.Column("value", sql.Text, nullable=False))
objects = sql.Table(
    "objects",
    _metadata,
    sql.Column("kind", sql.String(64), primary_key=True),
    sql.Column("project", sql.String(64), primary_key=True),
    sql.Column("name", sql.String(253), primary_key=True),
    sql.Column("uid", sql.String(64), nullable=False),
    sql.Column("version", sql.BigInteger, nullable=False),
    sql.Column("body", sql.Text, nullable=False),
)
changes = sql.Table(
    "changes",
    _metadata,
    sql.Column("version", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("event", sql.String(16), nullable=False),
    sql.Column("kind", sql.String(64), nullable=False),
    sql.Column("project", sql.String(64), nullable=False),
    sql.Column("name", sql.String(253), nullable=False),
    sql.Column("body", sql.Text, nullable=False),
)
answers = sql.Table(
    "answers",
    _metadata,
    sql.Column("owner", sql.String(128), primary_key=True),
    sql.Column("key", sql.String(255), primary_key=True),
    sql.Column("number", sql.BigInteger, nullable=False),
    sql.Column("digest", sql.String(64), nullable=False),
    sql.Column("status", sql.Integer, nullable=False),
    sql.Column("body", sql.Text, nullable=False),
)
output = sql.Table(
    "output",
    _metadata,
    sql.Column("process", sql.String(64), primary_key=True),
    sql.Column("number", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("stream", sql.String(8), nullable=False),
    sql.Column("data", sql.LargeBinary, nullable=False),
)
secrets = sql.Table(
    "secrets",
    _metadata,
    sql.Column("uid", sql.String(64), primary_key=True),
    sql.Column("version", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("sealed", sql.LargeBinary, nullable=False),
)


class Change(NamedTuple):
    """One object written (`ADDED`, `MODIFIED`) or removed (`DELETED`); `body` is the object after it, as JSON."""

    version: int
    event: str
    kind: str
    project: str
    name: str
    uid: str
    body: bytes


class Answer(NamedTuple):
    """What a request with an idempotency key was answered."""

    owner: str
    key: str
    number: int
    digest: str
    status: int
    body: bytes


class Piece(NamedTuple):
    """A piece of a process's output, in the order it came."""

    process: str
    number: int
    stream: str
    data: bytes


class Note(NamedTuple):
    """A value under a name."""

    key: str
    value: str


class Sealed(NamedTuple):
    """A version of a Secret's values."""

    uid: str
    version: int
    sealed: bytes


class Forget(NamedTuple):
    """The output of a process that is deleted, or the values of a Secret that is (`uid` of either)."""

    uid: str


Write = Change | Answer | Piece | Note | Sealed | Forget


def prepare(connection: sql.Connection) -> None:
    """Makes the tables, or refuses those of another version. Raises StateIncompatible."""
    if not sql.inspect(connection).has_table("notes"):
        _metadata.create_all(connection)
        connection.execute(sql.insert(notes).values(key="schema", value=str(SCHEMA_VERSION)))
        return
    found = connection.execute(sql.select(notes.c.value).where(notes.c.key == "schema")).scalar()
    if found != str(SCHEMA_VERSION):
        raise StateIncompatible(
            f"the server's database has version {str(found)[:20]}, this program reads {SCHEMA_VERSION}; "
            "use the program that wrote it, or another state folder"
        )


def carry_out(connection: sql.Connection, writes: Sequence[Write]) -> None:
    """All of `writes`, the later of two about one thing winning."""
    latest = {(write.kind, write.project, write.name): write for write in writes if isinstance(write, Change)}
    _upsert(connection, objects, [_row(change) for change in latest.values() if change.event != "DELETED"])
    for kind, project, name in [key for key, change in latest.items() if change.event == "DELETED"]:
        gone = (objects.c.kind == kind) & (objects.c.project == project) & (objects.c.name == name)
        connection.execute(sql.delete(objects).where(gone))
    _insert(
        connection,
        changes,
        (
            {"version": w.version, "event": w.event, "kind": w.kind, "project": w.project, "name": w.name, "body": w.body.decode()}
            for w in writes
            if isinstance(w, Change)
        ),
    )
    _upsert(connection, answers, [w._asdict() | {"body": w.body.decode()} for w in writes if isinstance(w, Answer)])
    _upsert(connection, output, [w._asdict() for w in writes if isinstance(w, Piece)])
    _upsert(connection, notes, [w._asdict() for w in {w.key: w for w in writes if isinstance(w, Note)}.values()])
    _upsert(connection, secrets, [w._asdict() for w in writes if isinstance(w, Sealed)])
    for write in writes:
        if isinstance(write, Forget):
            connection.execute(sql.delete(output).where(output.c.process == write.uid))
            connection.execute(sql.delete(secrets).where(secrets.c.uid == write.uid))


def prune(connection: sql.Connection, version: int, answered: int) -> None:
    """Drops changes and answers beyond what is kept."""
    connection.execute(sql.delete(changes).where(changes.c.version <= version - KEPT_CHANGES))
    connection.execute(sql.delete(answers).where(answers.c.number <= answered - KEPT_ANSWERS))


def _row(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "project": change.project,
        "name": change.name,
        "uid": change.uid,
        "version": change.version,
        "body": change.body.decode(),
    }


def _insert(connection: sql.Connection, table: sql.Table, rows: Iterable[dict[str, Any]]) -> None:
    if found := list(rows):
        connection.execute(sql.insert(table), found)


_statements: dict[tuple[str, str], Any] = {}


def _upsert(connection: sql.Connection, table: sql.Table, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    found = _statements.get((connection.dialect.name, table.name))
    if found is None:
        maker = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        made = maker(table)
        changed = {column.name: made.excluded[column.name] for column in table.columns if not column.primary_key}
        found = made.on_conflict_do_update(index_elements=[column.name for column in table.primary_key], set_=changed)
        _statements[(connection.dialect.name, table.name)] = found
    connection.execute(found, rows)
