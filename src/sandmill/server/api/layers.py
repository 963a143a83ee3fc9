"""Images that travel, over HTTP, between a node and its head only. In: digests, offsets. Out: what images and layers are; pieces of them.

A node is given the images of the sandboxes that were placed on it, and no others.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from starlette.responses import Response

from sandmill.server.api.context import JSON_TYPE, Asked, answer
from sandmill.server.api.kept import offset_of
from sandmill.server.api.processes import waiting
from sandmill.server.keys import HEAD
from sandmill.server.refusals import Refusal, not_found

_DIGEST: Final = re.compile("sha256:[0-9a-f]{64}")


async def image(asked: Asked) -> Response:
    """GET images/DIGEST: what it consists of."""
    asked.query(())
    digest = _digest(asked)
    if not _is_its_head(asked) and digest not in asked.on.boxes.places.images_on(asked.name):
        raise _not_yours(digest)
    return Response(msgspec.json.encode(await asked.on.shipping.image(digest)), media_type=JSON_TYPE)


async def layer(asked: Asked) -> Response:
    """GET layers/DIGEST: what its pieces come to."""
    asked.query(())
    return Response(msgspec.json.encode(await asked.on.shipping.parcel(_layer(asked))), media_type=JSON_TYPE)


async def piece(asked: Asked) -> Response:
    """GET layers/DIGEST/pieces?offset=: some bytes of its parcel; none at the end."""
    data = await asked.on.shipping.piece(_layer(asked), offset_of(asked))
    return Response(data, media_type="application/octet-stream")


async def supply(asked: Asked) -> Response:
    """PUT supplies/DIGEST?wait=: the head wants an image to be on this node; fetches it, and says how far that is."""
    query = asked.query(("wait",))
    if asked.on.supply is None:
        raise not_found("supplies", str(asked.request.path_params["digest"]))
    there = await asked.on.supply.until(_digest(asked), waiting(query.get("wait")))
    return answer({"phase": "Ready" if there else "Fetching"})


def _layer(asked: Asked) -> str:
    digest = _digest(asked)
    if not _is_its_head(asked):
        images = asked.on.boxes.places.images_on(asked.name)
        if not any(digest in asked.on.shipping.layers_of(one) for one in images):
            raise _not_yours(digest)
    return digest


def _digest(asked: Asked) -> str:
    """It becomes the name of a file."""
    digest = str(asked.request.path_params["digest"])
    if not _DIGEST.fullmatch(digest):
        raise not_found("images", digest)
    return digest


def _is_its_head(asked: Asked) -> bool:
    """Whether a node's head asks, which may have everything; otherwise it is the node of that name. Raises Refusal (Forbidden)."""
    if asked.who.role == HEAD:
        return True
    node = asked.on.records.get("Node", "", asked.name)
    if node is None or node["status"]["registeredBy"] != asked.who.name:
        raise Refusal("Forbidden", "this key is that of another node")
    return False


def _not_yours(digest: str) -> Refusal:
    return Refusal("Forbidden", f"no sandbox on this node starts from {digest}")
