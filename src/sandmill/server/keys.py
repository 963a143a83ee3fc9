"""Who may ask. In: bearer keys. Out: principals with their projects; refusals that tell nothing.

Keys are 256 random bits and are stored as SHA-256 digests; a digest is compared in constant time, and every stored digest is
compared, whichever matches.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Final

import msgspec

from sandmill.errors import ConfigError, StateIncompatible
from sandmill.server.refusals import Refusal, not_found
from sandmill.server.specs import NAME

PREFIX: Final = "sandmill_"
USER: Final = "user"
NODE: Final = "node"
"""Lets a machine join as a node, and nothing else."""
HEAD: Final = "head"
"""A node's server: the one it has joined."""
ROLES: Final = (USER, NODE)
_SHORTEST: Final = 16
_LONGEST: Final = 512


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A key's holder. No projects: all of them. `role`: what the key is for."""

    name: str
    digest: str
    projects: tuple[str, ...] = ()
    role: str = USER

    def check(self, project: str) -> None:
        """Raises Refusal (Forbidden) for a project that is not its own, NotFound for what is no project's name."""
        if self.role == NODE or (self.projects and project not in self.projects):
            raise Refusal("Forbidden", "this key has no access to that project")
        if not re.fullmatch(NAME, project):
            raise not_found("projects", project)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = 1
    keys: tuple[Principal, ...] = ()


class Keys:
    """The keys of one server, in its state folder. What is written there takes effect at once, also in a running server."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "keys.json"
        self._keys: tuple[Principal, ...] = ()
        self._given: tuple[Principal, ...] = ()
        self._seen = 0
        self._refresh()

    def __bool__(self) -> bool:
        return bool(self._keys or self._given)

    def give(self, key: str, name: str, role: str = USER) -> None:
        """Lets a key in for as long as this process runs; replaces one given before under that name.

        Raises ConfigError for one that is too short to be a secret.
        """
        self._given = (*(known for known in self._given if known.name != name), _principal(key, name, (), role))

    def add(self, key: str, name: str, projects: tuple[str, ...] = (), role: str = USER) -> None:
        """Lets a key in; replaces the one of that name. Raises ConfigError for one that is too short to be a secret, or another role."""
        added = _principal(key, name, projects, role)
        self._keys = (*(known for known in self._keys if known.name != name), added)
        self._write()

    def remove(self, name: str) -> None:
        """Ends a key. Raises ConfigError when there is none of that name."""
        if all(known.name != name for known in self._keys):
            raise ConfigError(f"there is no key named {name!a}", field="NAME")
        self._keys = tuple(known for known in self._keys if known.name != name)
        self._write()

    def all(self) -> tuple[Principal, ...]:
        """The stored keys' holders."""
        return self._keys

    def make(self, name: str, projects: tuple[str, ...] = (), role: str = USER) -> str:
        """A new key, which is nowhere but in the answer."""
        key = fresh_key()
        self.add(key, name, projects, role)
        return key

    def who(self, authorization: str | None) -> Principal:
        """The holder of `Bearer KEY`. Raises Refusal (Unauthorized), the same for every cause."""
        scheme, _, key = (authorization or "").partition(" ")
        self._refresh()
        digest = _digest(key.strip()) if scheme.lower() == "bearer" and len(key) <= _LONGEST else _digest("")
        found = None
        for principal in (*self._keys, *self._given):
            if hmac.compare_digest(principal.digest, digest):
                found = principal
        if found is None:
            raise Refusal("Unauthorized", "a valid key is needed", fix="set NODUS_API_KEY to a key of this server")
        return found

    def _refresh(self) -> None:
        """Reads the file when it has changed."""
        try:
            written = self._path.stat().st_mtime_ns
            if written == self._seen:
                return
            found = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            self._keys, self._seen = (), 0
            return
        except (msgspec.DecodeError, OSError) as error:
            raise StateIncompatible(f"{self._path} is no list of keys ({error}); choose another state folder") from error
        if found.version != 1:
            raise StateIncompatible(f"{self._path} has version {found.version}, this program reads 1; choose another state folder")
        self._keys, self._seen = found.keys, written

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(_File(keys=self._keys)))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)
        self._seen = self._path.stat().st_mtime_ns


def fresh_key() -> str:
    """A key that nobody knows yet."""
    return PREFIX + secrets.token_urlsafe(32)


def _principal(key: str, name: str, projects: tuple[str, ...], role: str) -> Principal:
    if not _SHORTEST <= len(key) <= _LONGEST or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"a key has from {_SHORTEST} to {_LONGEST} printable ASCII characters without spaces", field="key")
    if role not in (*ROLES, HEAD):
        raise ConfigError(f"{role!a} is no role of a key; one is {' or '.join(ROLES)}", field="--role")
    if role == NODE and projects:
        raise ConfigError("a node's key belongs to no project; leave --project out", field="--project")
    for project in projects:
        if not re.fullmatch(NAME, project):
            raise ConfigError(f"{project!a} is no project's name: lower-case letters, digits and '-'", field="--project")
    return Principal(name=name, digest=_digest(key), projects=projects, role=role)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
