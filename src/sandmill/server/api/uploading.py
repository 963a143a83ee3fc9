"""Blobs over HTTP. In: an announced upload, its bytes; a digest. Out: where to put them; the bytes again.

Whoever uploads shows the token of the announcement instead of a key, as the published client does.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from sandmill.server.api.context import Asked, Context, answer, of_error, refused
from sandmill.server.blobs import LARGEST
from sandmill.server.refusals import Refusal, invalid
from sandmill.server.schema import Causes, Record, Text, Whole

UPLOAD: Final = Record(
    about="What is going to be uploaded.",
    required=("sha256", "size"),
    fields={
        "sha256": Text(about="Its digest.", pattern="[0-9a-f]{64}", expect="64 hexadecimal digits", longest=64),
        "size": Whole(about="Its bytes.", least=0, most=LARGEST),
        "contentType": Text(about="Its media type.", longest=255),
    },
)


async def announce(asked: Asked) -> Response:
    """POST uploads: where to put a blob, or that it is there already."""
    causes = Causes()
    given = UPLOAD.check(await asked.json(), "", causes)
    if causes.found:
        raise invalid("blobs", "", causes.found)
    token = asked.on.blobs.grant(asked.project, given["sha256"], given["size"])
    if token is None:
        return answer({"exists": True})
    place = asked.request.url.replace(path=f"/blobs/v1/namespaces/{asked.project}/blobs/{given['sha256']}", query=f"grant={token}")
    return answer({"exists": False, "url": str(place), "headers": {}}, 201)


async def take(on: Context, request: Request) -> Response:
    """PUT blobs/DIGEST?grant=: the bytes."""
    try:
        token = request.query_params.get("grant", "")
        grant = on.blobs.granted(token, request.path_params["project"], request.path_params["digest"])
        await on.blobs.take(token, grant, request.stream())
    except Refusal as refusal:
        return refused(refusal)
    except ClientDisconnect:
        return Response(status_code=499)
    except Exception as error:  # noqa: BLE001 - what broke becomes an answer, as behind the key
        return refused(of_error(error))
    return answer({})


async def give(asked: Asked) -> Response:
    """GET blobs/DIGEST."""
    digest = str(asked.request.path_params["digest"])
    path = asked.on.blobs.read(asked.project, digest)
    return FileResponse(path, media_type="application/octet-stream", headers={"X-Nodus-SHA256": digest})
