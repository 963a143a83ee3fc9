"""Files in sandboxes over HTTP. In: a path and bytes. Out: bytes, or a folder's entries; paths are the sandbox's own, for its own user."""

from __future__ import annotations

import base64
import errno
import hashlib
from typing import Final

import msgspec
from starlette.responses import Response

from sandmill.errors import SandboxFileError
from sandmill.sandboxes import FileEntry, Sandbox
from sandmill.server.api.context import LARGEST_FILE, Asked, answer
from sandmill.server.live import Live
from sandmill.server.refusals import Refusal
from sandmill.server.schema import shown

_LONGEST_PATH: Final = 4096
_READS_LINES: Final = "nodus/"
"""The published command line reads a folder as one entry a line, the published SDK as one document; both ask for application/json."""
_KINDS: Final = {"file": "File", "folder": "Directory", "link": "Symlink", "other": "Other"}


async def get(asked: Asked) -> Response:
    """GET files?path=: a file's bytes; with Accept: application/json a folder's entries."""
    query = asked.query(("path",))
    path = _path(query.get("path"))
    live = await _live(asked)
    if asked.request.headers.get("accept", "").split(",")[0].strip().startswith("application/json"):
        lines = asked.request.headers.get("user-agent", "").startswith(_READS_LINES)
        return await _listing(live.sandbox, path, lines=lines)
    data = await live.sandbox.read.aio(path, max_bytes=LARGEST_FILE)
    headers = {"X-Nodus-SHA256": hashlib.sha256(data).hexdigest()}
    return Response(data, 200, headers, "application/octet-stream")


async def put(asked: Asked) -> Response:
    """PUT files?path=&expectedSHA256=: writes a whole file, only over the contents that the writer has seen."""
    query = asked.query(("path", "expectedSHA256", "mode"))
    path = _path(query.get("path"))
    expected = query.get("expectedSHA256")
    if expected is not None and (len(expected) != 64 or set(expected) - set("0123456789abcdef")):
        raise Refusal("BadRequest", f"expectedSHA256 is 64 hexadecimal digits, found {shown(expected)}")
    data = await asked.body(LARGEST_FILE)
    live = await _live(asked)
    if expected is not None:
        await _check_unchanged(live.sandbox, path, expected)
    await live.sandbox.write.aio(path, data)
    return answer({"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})


async def delete(asked: Asked) -> Response:
    """DELETE files?path=: a file, or a folder with everything in it."""
    query = asked.query(("path", "recursive"))
    live = await _live(asked)
    await live.sandbox.remove.aio(_path(query.get("path")), recursive=query.get("recursive", "true").lower() not in ("false", "0"))
    return answer({})


async def _live(asked: Asked) -> Live:
    live = await asked.on.boxes.running(asked.project, asked.name)
    live.touch()
    return live


async def _listing(sandbox: Sandbox, path: str, *, lines: bool) -> Response:
    """A folder's entries, or the one entry that a file is."""
    try:
        entries = await sandbox.list.aio(path)
    except SandboxFileError as error:
        if error.errno != errno.ENOTDIR:
            raise
        if lines:  # that client takes any list for a folder's
            raise Refusal("BadRequest", f"{ascii(path)[1:-1][:200]} is not a folder") from None
        folder, _, name = path.rstrip("/").rpartition("/")
        entries = [entry for entry in await sandbox.list.aio(folder or "/") if entry.name == name]
    if lines:
        return Response(b"".join(msgspec.json.encode(_entry(entry)) + b"\n" for entry in entries), media_type="application/x-ndjson")
    return answer({"path": path, "items": [_entry(entry) for entry in entries]})


def _entry(entry: FileEntry) -> dict[str, object]:
    """A name that is no UTF-8 also comes as bytes, since JSON cannot carry it."""
    name = entry.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    folder = entry.kind == "folder"
    item: dict[str, object] = {
        "name": name,
        "type": _KINDS[entry.kind],
        "dir": folder,
        "mode": 0o755 if folder else 0o644,
        "size": entry.size_bytes,
    }
    if name != entry.name:
        item["nameBytes"] = base64.b64encode(entry.name.encode("utf-8", "surrogateescape")).decode()
    return item


async def _check_unchanged(sandbox: Sandbox, path: str, expected: str) -> None:
    try:
        found = hashlib.sha256(await sandbox.read.aio(path, max_bytes=LARGEST_FILE)).hexdigest()
    except SandboxFileError as error:
        if error.errno != errno.ENOENT:
            raise
        found = hashlib.sha256(b"").hexdigest()
    if found != expected:
        raise Refusal("SHA256Mismatch", f"{ascii(path)[1:-1][:200]} has other contents than the writer started from; nothing was written")


def _path(path: str | None) -> str:
    if not path or "\0" in path or len(path) > _LONGEST_PATH:
        raise Refusal("BadRequest", f"path must be given, without NUL and with at most {_LONGEST_PATH} characters")
    return path
