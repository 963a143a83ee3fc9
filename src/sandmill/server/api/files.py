"""Files in sandboxes over HTTP. In: a path and bytes. Out: bytes, or a folder's entries; paths are the sandbox's own, for its own user."""

from __future__ import annotations

import base64
import errno
import hashlib
import re
from typing import Final

import msgspec
from starlette.responses import Response

from sandmill.errors import SandboxFileError
from sandmill.sandboxes import FileEntry, Sandbox
from sandmill.server.api.context import LARGEST_FILE, Asked, answer
from sandmill.server.live import Live
from sandmill.server.refusals import Refusal
from sandmill.server.schema import shown

_CHMOD_S: Final = 10.0
_LONGEST_PATH: Final = 4096
_READS_LINES: Final = "nodus/"
"""The published command line reads a folder as one entry a line, the published SDK as one document; both ask for application/json.

It copies files only, and takes whatever it cannot list for one: a folder without files, or a link to anything else, would end its copy.
"""
_MOST_LOOKS: Final = 500
_KINDS: Final = {"file": "File", "folder": "Directory", "link": "Symlink", "other": "Other"}


async def get(asked: Asked) -> Response:
    """GET files?path=: a file's bytes; with Accept: application/json a folder's entries."""
    query = asked.query(("path", "user"))
    path, user = _path(query.get("path")), _user(query.get("user"))
    live = await _live(asked)
    if asked.request.headers.get("accept", "").split(",")[0].strip().startswith("application/json"):
        lines = asked.request.headers.get("user-agent", "").startswith(_READS_LINES)
        return await _listing(live.sandbox, path, user, lines=lines)
    data = await live.sandbox.read.aio(path, user=user, max_bytes=LARGEST_FILE)
    headers = {"X-Nodus-SHA256": hashlib.sha256(data).hexdigest()}
    return Response(data, 200, headers, "application/octet-stream")


async def put(asked: Asked) -> Response:
    """PUT files?path=&expectedSHA256=: writes a whole file, only over the contents that the writer has seen; with folder=true, a folder."""
    query = asked.query(("path", "expectedSHA256", "user", "folder", "mode"))
    path, user = _path(query.get("path")), _user(query.get("user"))
    expected = query.get("expectedSHA256")
    if expected is not None and (len(expected) != 64 or set(expected) - set("0123456789abcdef")):
        raise Refusal("BadRequest", f"expectedSHA256 is 64 hexadecimal digits, found {shown(expected)}")
    mode = query.get("mode") or None
    if mode is not None and not re.fullmatch(r"(0o?)?[0-7]{3,5}", mode):
        raise Refusal("BadRequest", f"mode is an octal number such as 0755, found {shown(mode)}")
    data = await asked.body(LARGEST_FILE)
    live = await _live(asked)
    if query.get("folder", "false").lower() in ("true", "1"):
        await live.sandbox.mkdir.aio(path, user=user)
        return answer({"path": path})
    if expected is not None:
        await _check_unchanged(live.sandbox, path, user, expected)
    await live.sandbox.write.aio(path, data, user=user)
    if mode is not None:
        await _set_mode(live.sandbox, path, mode, user)
    return answer({"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})


async def delete(asked: Asked) -> Response:
    """DELETE files?path=: a file, or a folder with everything in it."""
    query = asked.query(("path", "recursive", "user"))
    path, user = _path(query.get("path")), _user(query.get("user"))
    live = await _live(asked)
    await live.sandbox.remove.aio(path, recursive=query.get("recursive", "true").lower() not in ("false", "0"), user=user)
    return answer({})


async def _live(asked: Asked) -> Live:
    live = await asked.on.boxes.running(asked.project, asked.name)
    live.touch()
    return live


async def _listing(sandbox: Sandbox, path: str, user: str, *, lines: bool) -> Response:
    """A folder's entries, or the one entry that a file is."""
    try:
        entries = await sandbox.list.aio(path, user=user)
    except SandboxFileError as error:
        if error.errno != errno.ENOTDIR:
            raise
        if lines:  # that client takes any list for a folder's
            raise Refusal("BadRequest", f"{ascii(path)[1:-1][:200]} is not a folder") from None
        folder, _, name = path.rstrip("/").rpartition("/")
        entries = [entry for entry in await sandbox.list.aio(folder or "/", user=user) if entry.name == name]
    if lines:
        looks = [_MOST_LOOKS]
        entries = [entry for entry in entries if await _holds_files(sandbox, f"{path.rstrip('/')}/{entry.name}", entry.kind, user, looks)]
        return Response(b"".join(msgspec.json.encode(_entry(entry)) + b"\n" for entry in entries), media_type="application/x-ndjson")
    return answer({"path": path, "items": [_entry(entry) for entry in entries]})


async def _holds_files(sandbox: Sandbox, path: str, kind: str, user: str, looks: list[int]) -> bool:
    """Whether it is a file or has one below it, as far as some hundred looks tell; a link's is what it leads to."""
    if kind == "file" or not looks[0]:
        return True
    looks[0] -= 1
    try:
        if kind == "link":
            await sandbox.read.aio(path, user=user, max_bytes=0)
            return True
        inner = await sandbox.list.aio(path, user=user) if kind == "folder" else []
    except SandboxFileError as error:
        return error.errno in ((errno.EFBIG,) if kind == "link" else (errno.EACCES,))
    for entry in sorted(inner, key=lambda entry: entry.kind != "file"):
        if await _holds_files(sandbox, f"{path}/{entry.name}", entry.kind, user, looks):
            return True
    return False


def _entry(entry: FileEntry) -> dict[str, object]:
    """A name that is no UTF-8 also comes as bytes, since JSON cannot carry it."""
    name = entry.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    folder = entry.kind == "folder"
    item: dict[str, object] = {
        "name": name,
        "type": _KINDS[entry.kind],
        "dir": folder,
        "mode": entry.mode,
        "size": entry.size_bytes,
    }
    if name != entry.name:
        item["nameBytes"] = base64.b64encode(entry.name.encode("utf-8", "surrogateescape")).decode()
    return item


async def _set_mode(sandbox: Sandbox, path: str, mode: str, user: str) -> None:
    """Permissions only: what would run as another user is not taken over."""
    done = await sandbox.run.aio("chmod", f"{int(mode, 8) & 0o777:o}", "--", path, user=user, timeout=_CHMOD_S)
    if done.exit_code != 0:
        raise SandboxFileError(errno.EPERM, "the mode could not be set", path)


async def _check_unchanged(sandbox: Sandbox, path: str, user: str, expected: str) -> None:
    try:
        found = hashlib.sha256(await sandbox.read.aio(path, user=user, max_bytes=LARGEST_FILE)).hexdigest()
    except SandboxFileError as error:
        if error.errno != errno.ENOENT:
            raise
        found = hashlib.sha256(b"").hexdigest()
    if found != expected:
        raise Refusal("SHA256Mismatch", f"{ascii(path)[1:-1][:200]} has other contents than the writer started from; nothing was written")


def _user(user: str | None) -> str:
    if user not in (None, "user", "root"):
        raise Refusal("BadRequest", f"user is user or root (inside the sandbox), found {shown(user)}")
    return user or "user"


def _path(path: str | None) -> str:
    if not path or "\0" in path or len(path) > _LONGEST_PATH:
        raise Refusal("BadRequest", f"path must be given, without NUL and with at most {_LONGEST_PATH} characters")
    return path
