"""Forks, freezing, refusals and image logs over HTTP. In: a Sandbox's or an Image's name. Out: new objects, changed ones, lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response

from sandmill.server.api.context import Asked, answer, decode
from sandmill.server.api.objects import find, read, shown_value
from sandmill.server.api.processes import text_of, waiting
from sandmill.server.catalog import ENDED
from sandmill.server.kinds import API_VERSION, BY_KIND
from sandmill.server.records import Value
from sandmill.server.refusals import invalid
from sandmill.server.schema import Causes, Record, Text, Whole
from sandmill.server.tables import Write

SANDBOX: Final = BY_KIND["Sandbox"]
IMAGE: Final = BY_KIND["Image"]
MOST_FORKS: Final = 256
FORK: Final = Record(
    about="How many copies of a sandbox to make: all of them, or none.",
    required=("count",),
    fields={
        "count": Whole(about="How many.", least=1, most=MOST_FORKS),
        "generateName": Text(
            about="The beginning of their names; the sandbox's own name and a dash without it.",
            pattern=r"[a-z0-9][-a-z0-9]{0,56}",
            expect="at most 57 lower-case letters, digits and '-'",
            longest=57,
        ),
    },
)


async def fork(asked: Asked) -> Response:
    """POST sandboxes/NAME/fork: running sandboxes that start from its files as they are now; wakes a stopped one."""
    asked.query(())
    body = await asked.body()
    asked.media_type(("application/json",))
    path = asked.request.url.path.encode()
    with await asked.on.answers.turn(asked.who.digest, asked.request.headers.get("idempotency-key"), path + b"\0" + body) as turn:
        if turn.before is not None:
            return Response(turn.before.body, turn.before.status, {"Idempotent-Replayed": "true"}, "application/json")
        causes = Causes()
        given = FORK.check(decode(body), "", causes)
        if causes.found:
            raise invalid("sandboxes", asked.name, causes.found)
        beginning = given.get("generateName", f"{asked.name[:56]}-")

        def said(stored: Sequence[Value]) -> Write | None:
            return turn.answer(201, msgspec.json.encode(_listed(stored)))

        made = await asked.on.branches.fork(asked.project, asked.name, given["count"], beginning, said)
    return answer(_listed(made), 201)


async def freeze(asked: Asked) -> Response:
    """POST sandboxes/NAME/freeze: everything in it stands still, its files can be read and written. Idempotent."""
    return await _frozen(asked, frozen=True)


async def thaw(asked: Asked) -> Response:
    """POST sandboxes/NAME/thaw: it goes on. Idempotent."""
    return await _frozen(asked, frozen=False)


async def blocked(asked: Asked) -> Response:
    """GET sandboxes/NAME/blocked: what its network policy refused, in this run or the last; names in it were chosen inside."""
    asked.query(())
    return answer({"items": await asked.on.branches.blocked(asked.project, asked.name)})


async def image(asked: Asked) -> Response:
    """GET of an image; `wait` holds the answer until it is Ready or Failed, or that long."""
    wait_s = waiting(asked.request.query_params.get("wait"))
    value = find(asked, IMAGE)
    if wait_s and value["status"]["phase"] not in ENDED:
        await asked.on.catalog.until_ended(value, wait_s)
    return await read(asked, IMAGE)


async def image_log(asked: Asked) -> Response:
    """GET log of an image: a line for each step of its build, and why it failed."""
    return await text_of(asked, find(asked, IMAGE))


async def _frozen(asked: Asked, *, frozen: bool) -> Response:
    asked.query(())
    await asked.body()
    value = await asked.on.branches.freeze(asked.project, asked.name, frozen=frozen)
    return answer(shown_value(asked, SANDBOX, value))


def _listed(values: Sequence[Value]) -> dict[str, Any]:
    meta = {"resourceVersion": values[-1]["metadata"]["resourceVersion"]}
    return {"apiVersion": API_VERSION, "kind": "SandboxList", "metadata": meta, "items": list(values)}
