"""Nodes over HTTP. In: their beats, with a node's key; a drain or a removal, with a key of all projects. Out: what the node is told."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from starlette.responses import Response

from sandmill.server.admission import checked, replaced
from sandmill.server.api.context import Asked, answer, decode
from sandmill.server.api.objects import find, shown_value
from sandmill.server.beats import LONGEST, beat_of
from sandmill.server.kinds import BY_KIND
from sandmill.server.patching import MERGE, OPERATIONS, patched
from sandmill.server.refusals import Cause, Refusal, invalid
from sandmill.server.specs import NAME

_NODE: Final = BY_KIND["Node"]


def unbound(handler: Callable[[Asked], Awaitable[Response]]) -> Callable[[Asked], Awaitable[Response]]:
    """A handler for keys of all projects only: a project's key is told nothing of the machines."""

    async def serve(asked: Asked) -> Response:
        if asked.who.projects:
            raise Refusal("Forbidden", "nodes belong to no project; a key of all projects is needed")
        return await handler(asked)

    return serve


async def beat(asked: Asked) -> Response:
    """POST nodes/NAME/beats: a node's sign of life."""
    if not re.fullmatch(NAME, asked.name):
        cause = Cause("name", "FieldValueInvalid", "expected at most 63 lower-case letters, digits and '-'")
        raise invalid("nodes", asked.name, [cause])
    asked.media_type(("application/json",))
    told = await asked.on.nodes.heard(asked.name, asked.who.name, beat_of(await asked.body(LONGEST)))
    return Response(msgspec.json.encode(told), media_type="application/json")


async def patch(asked: Asked) -> Response:
    """PATCH nodes/NAME: drains it, or lets it take sandboxes again."""
    asked.query(("dryRun", "fieldManager", "fieldValidation", "force", "pretty"))
    media_type = asked.media_type((MERGE, OPERATIONS))
    before = find(asked, _NODE)
    given = checked(_NODE, patched(before, decode(await asked.body()), media_type), None)
    value = replaced(_NODE, before, given)
    if value != before and not asked.request.query_params.get("dryRun"):
        value = await asked.on.records.save("Node", "", value)
        asked.on.nodes.changed(value)
    return answer(shown_value(asked, _NODE, asked.on.records.get("Node", "", asked.name) or value))


async def delete(asked: Asked) -> Response:
    """DELETE nodes/NAME: forgets a node that holds nothing; should it still run, it ends."""
    value = find(asked, _NODE)
    await asked.on.nodes.remove(asked.name)
    details = {"name": asked.name, "group": "nodus.dev", "kind": "nodes", "uid": value["metadata"]["uid"]}
    return answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
