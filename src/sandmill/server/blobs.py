"""Bytes that objects refer to by digest. In: uploads that were announced. Out: files, each visible to its project only, within a bound.

<state>/blobs/<project>/<sha256>    one blob; its time of change is that of its last use
                        .new-*      being written; swept at the next start
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

from sandmill.server.refusals import Cause, Refusal, invalid, not_found
from sandmill.server.specs import NAME

LARGEST: Final = 512 << 20
_GRANT_S: Final = 900.0
_MOST_GRANTS: Final = 1000
_MOST_BYTES: Final = 8 << 30
"""Of one project; beyond that the ones unused for longest go."""


class Grant(NamedTuple):
    """Leave to upload one blob."""

    project: str
    digest: str
    size_bytes: int
    ends: float


class Blobs:
    """All blobs of the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "blobs"
        self._grants: dict[str, Grant] = {}
        for left in self._folder.glob("*/.new-*"):
            left.unlink(missing_ok=True)

    def find(self, project: str, reference: str, field: str) -> Path:
        """The file of `sha256:<hex>`. Raises Refusal (Invalid) naming the field."""
        path = self._path(project, reference.removeprefix("sha256:"))
        try:
            os.utime(path)
        except FileNotFoundError:
            message = f"there is no blob {reference[:71]!a} in project {project!r}; upload it first"
            raise invalid("blobs", "", [Cause(field, "FieldValueNotFound", message)]) from None
        return path

    def read(self, project: str, digest: str) -> Path:
        """The file of a digest. Raises Refusal (NotFound)."""
        path = self._path(project, digest)
        if not path.exists():
            raise not_found("blobs", digest)
        return path

    def grant(self, project: str, digest: str, size_bytes: int) -> str | None:
        """A token to upload a blob with, None when it is there already."""
        path = self._path(project, digest)
        if path.exists():
            os.utime(path)
            return None
        now = time.monotonic()
        self._grants = {token: grant for token, grant in self._grants.items() if grant.ends > now}
        if len(self._grants) >= _MOST_GRANTS:
            raise Refusal("QuotaExceeded", f"{_MOST_GRANTS} uploads are announced and have not come", retry_after_s=30)
        token = secrets.token_urlsafe(24)
        self._grants[token] = Grant(project, digest, size_bytes, now + _GRANT_S)
        return token

    def granted(self, token: str, project: str, digest: str) -> Grant:
        """What a token allows. Raises Refusal (Forbidden)."""
        grant = self._grants.get(token)
        if grant is None or grant.ends <= time.monotonic() or (grant.project, grant.digest) != (project, digest):
            raise Refusal("Forbidden", "this upload was not announced, or too long ago")
        return grant

    async def take(self, token: str, grant: Grant, pieces: AsyncIterator[bytes]) -> None:
        """Writes an upload, whole or not at all. Raises Refusal (SHA256Mismatch, BadRequest)."""
        path = self._path(grant.project, grant.digest)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".new-{secrets.token_hex(8)}")
        found, size = hashlib.sha256(), 0
        try:
            with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
                async with asyncio.timeout(_GRANT_S):
                    async for piece in pieces:
                        size += len(piece)
                        if size > grant.size_bytes:
                            break
                        found.update(piece)
                        await asyncio.to_thread(file.write, piece)
            if size != grant.size_bytes:
                raise Refusal(
                    "BadRequest", f"{grant.size_bytes} bytes were announced, and {'more' if size > grant.size_bytes else size} came"
                )
            if found.hexdigest() != grant.digest:
                raise Refusal("SHA256Mismatch", "the bytes are not those of the digest that was announced")
            await asyncio.to_thread(self._make_room, path.parent, size)
            draft.rename(path)
            self._grants.pop(token, None)
        except TimeoutError:
            raise Refusal("BadRequest", f"the upload did not end within {_GRANT_S:.0f} s") from None
        finally:
            draft.unlink(missing_ok=True)

    def _make_room(self, folder: Path, more: int) -> None:
        there = [
            (entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(folder) if not entry.name.startswith(".")
        ]
        total = sum(size for _, size, _ in there) + more
        for _, size, path in sorted(there):
            if total <= _MOST_BYTES:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size

    def _path(self, project: str, digest: str) -> Path:
        """Both words become names of files: nothing else than a project's name and 64 digits may."""
        if not re.fullmatch(NAME, project) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise not_found("blobs", digest)
        return self._folder / project / digest
