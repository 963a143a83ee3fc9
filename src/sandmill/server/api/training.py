"""What belongs to a training job besides itself. In: GET on its subresources. Out: its task events, page by page; its outputs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.responses import FileResponse, Response

from sandmill.sandboxes.dual import in_thread
from sandmill.server.api.context import Asked, answer
from sandmill.server.api.objects import find
from sandmill.server.kinds import BY_KIND
from sandmill.server.refusals import Refusal, not_found
from sandmill.server.schema import nearest, shown
from sandmill.server.trainer import TaskEvent
from sandmill.server.training import listed

_JOB: Final = BY_KIND["TrainingJob"]
_TYPES: Final = ("Metrics", "Task")
_PHASES: Final = ("Baseline", "Training", "Evaluation")
_MOST: Final = 1000
_USUAL: Final = 100
_READ_AT_ONCE: Final = 1 << 20
_item: Final = msgspec.json.Decoder(TaskEvent)


async def taskevents(asked: Asked) -> Response:
    """GET taskevents: those of a type and phase, oldest first; `after` takes the last page's `continue`."""
    query = asked.query(("eventType", "phase", "after", "limit"))
    for key, words in (("eventType", _TYPES), ("phase", _PHASES)):
        if key in query and query[key] not in words:
            near = nearest(query[key], list(words))
            raise Refusal("BadRequest", f"{key} is {' or '.join(words)}, found {shown(query[key])}{near}")
    limit = _whole(query.get("limit"), "limit", _USUAL, _MOST) or _USUAL
    path = asked.on.training.events_of(find(asked, _JOB))
    start = _whole(query.get("after"), "after", 0, 2**53)
    items, more = await in_thread(lambda: _page(path, start, limit, query.get("eventType"), query.get("phase")))
    return answer({"items": items, **({} if more is None else {"continue": str(more)})})


async def outputs(asked: Asked) -> Response:
    """GET outputs: their names and sizes."""
    asked.query(())
    folder = asked.on.training.outputs_of(find(asked, _JOB))
    return answer({"items": await in_thread(lambda: listed(folder))})


async def output(asked: Asked) -> Response:
    """GET outputs/PATH: one of them, with its digest."""
    asked.query(("index",))
    folder = asked.on.training.outputs_of(find(asked, _JOB))
    name = str(asked.request.path_params["path"])
    known = [one["name"] for one in await in_thread(lambda: listed(folder))]
    if name not in known:
        raise not_found("outputs", name)
    digest = await in_thread(lambda: _digest(folder / name))
    return FileResponse(folder / name, media_type="application/octet-stream", headers={"X-Nodus-SHA256": digest})


def _page(path: Path, start: int, limit: int, kind: str | None, phase: str | None) -> tuple[list[dict[str, Any]], int | None]:
    """Up to `limit` events from a place in the file, and the place of the next one; None when there is none yet. Blocks."""
    items: list[dict[str, Any]] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return [], None
    with file:
        file.seek(start)
        while (line := file.readline(_READ_AT_ONCE)).endswith(b"\n"):
            try:
                event = _item.decode(line)
            except msgspec.MsgspecError:
                raise Refusal("BadRequest", "`after` is no `continue` of this job's pages; read them from the first") from None
            if kind in (None, event.event_type) and phase in (None, event.phase):
                if len(items) == limit:
                    return items, start
                items.append(msgspec.to_builtins(event))
            start += len(line)
    return items, None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _whole(text: str | None, key: str, default: int, most: int) -> int:
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text[:17]) > most:
        raise Refusal("BadRequest", f"{key} is a whole number up to {most}, found {shown(text)}")
    return int(text)
