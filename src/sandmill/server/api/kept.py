"""What a stop has kept of a sandbox, piece by piece. In: an offset, and bytes. Out: bytes. Only between a node and its head.

The bytes are an archive that the sandbox's own tar wrote and only a sandbox's tar unpacks.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from starlette.responses import Response

from sandmill.server.api.context import Asked, answer
from sandmill.server.api.objects import find
from sandmill.server.kinds import BY_KIND
from sandmill.server.node_sandbox import PIECE
from sandmill.server.refusals import Refusal
from sandmill.server.schema import shown


async def get(asked: Asked) -> Response:
    """GET sandboxes/NAME/kept?offset=: at most PIECE bytes; none at the end."""
    path, offset = _kept(asked)
    return Response(await asyncio.to_thread(_read, path, offset), media_type="application/octet-stream")


async def put(asked: Asked) -> Response:
    """PUT sandboxes/NAME/kept?offset=: the next bytes, before the first start."""
    path, offset = _kept(asked)
    value = find(asked, BY_KIND["Sandbox"])
    if value["status"]["phase"] != "Stopped":
        raise Refusal("Conflict", f"sandbox {asked.name!r} is not stopped", name=asked.name)
    await asyncio.to_thread(_write, path, offset, await asked.body(2 * PIECE))
    return answer({"offset": offset})


def _kept(asked: Asked) -> tuple[Path, int]:
    offset = offset_of(asked)
    return asked.on.boxes.keeping.path(find(asked, BY_KIND["Sandbox"])["metadata"]["uid"]), offset


def offset_of(asked: Asked) -> int:
    """The one parameter of a request for a piece. Raises Refusal (BadRequest)."""
    text = asked.query(("offset",)).get("offset", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise Refusal("BadRequest", f"offset is a whole number, found {shown(text)}")
    return int(text)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE)
    except FileNotFoundError:
        raise Refusal("NotFound", "nothing of that sandbox has been kept") from None


def _write(path: Path, offset: int, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
        file.seek(offset)
        file.truncate()
        file.write(data)
