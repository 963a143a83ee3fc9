"""What every request handler is given. In: the server's parts. Out: one value; a request's principal, project, JSON body and answer."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sandmill.errors import ExecFailed, SandboxError, SandboxFileError, SandboxGone, StoreUnavailable, Unsupported
from sandmill.server.answers import Answers
from sandmill.server.blobs import Blobs
from sandmill.server.boxes import Boxes
from sandmill.server.branches import Branches
from sandmill.server.catalog import Catalog
from sandmill.server.commands import Commands
from sandmill.server.environments import Environments
from sandmill.server.events import Events
from sandmill.server.fetching import Supply
from sandmill.server.images import Images
from sandmill.server.keys import HEAD, USER, Keys, Principal
from sandmill.server.nodes import Nodes
from sandmill.server.outputs import Outputs
from sandmill.server.records import Records, Value
from sandmill.server.refusals import EXHAUSTED, Cause, Refusal
from sandmill.server.schema import nearest, shown
from sandmill.server.secrets import Secrets
from sandmill.server.settings import Settings
from sandmill.server.shipping import Shipping
from sandmill.server.training import TrainingJobs

LARGEST_BODY: Final = 2 << 20
LARGEST_FILE: Final = 64 << 20
JSON_TYPE: Final = "application/json"
_FILE_REASONS: Final = {
    errno.ENOENT: "NotFound",
    errno.EACCES: "Forbidden",
    errno.EPERM: "Forbidden",
    errno.EROFS: "Forbidden",
    errno.EFBIG: "FileTooLarge",
    errno.ENOSPC: "CapacityUnavailable",
    errno.EDQUOT: "CapacityUnavailable",
    errno.EMFILE: "CapacityUnavailable",
    errno.ENFILE: "CapacityUnavailable",
}
_log = logging.getLogger("sandmill.server")


class Maker(Protocol):
    """The controller of a kind whose objects are made once they are stored."""

    def admit(self, project: str, spec: Value) -> None:
        """Whether such a thing can be made. Raises Refusal."""
        ...

    def soon(self, value: Value) -> None:
        """Makes it in the background; how it went is in its object."""
        ...

    async def forget(self, value: Value) -> None:
        """Its object was removed."""
        ...


class Context(NamedTuple):
    """One server."""

    settings: Settings
    records: Records
    events: Events
    secrets: Secrets
    catalog: Catalog
    boxes: Boxes
    branches: Branches
    images: Images
    environments: Environments
    training: TrainingJobs
    blobs: Blobs
    commands: Commands
    outputs: Outputs
    answers: Answers
    keys: Keys
    nodes: Nodes
    shipping: Shipping
    supply: Supply | None
    """A node's: what its head wants there."""

    def maker(self, kind: str) -> Maker | None:
        """The controller of a kind that is made; None for the others."""
        makers: Mapping[str, Maker] = {"Image": self.images, "Environment": self.environments, "TrainingJob": self.training}
        return makers.get(kind)


class Asked(NamedTuple):
    """One authenticated request."""

    on: Context
    request: Request
    who: Principal

    @property
    def project(self) -> str:
        """The project in the path."""
        return str(self.request.path_params["project"])

    @property
    def name(self) -> str:
        """The object's name in the path."""
        return str(self.request.path_params["name"])

    def may_see(self, value: Value) -> bool:
        """Events and usage belong to projects, though their paths do not: a key sees those of its own."""
        if not self.who.projects:
            return True
        if "Node" in (value["kind"], value.get("involvedObject", {}).get("kind")):
            return False
        owner = value["metadata"].get("namespace") or value.get("project") or None
        return owner is None or owner in self.who.projects

    def query(self, known: tuple[str, ...]) -> Mapping[str, str]:
        """The query's parameters. Raises Refusal (BadRequest) for unknown or repeated ones."""
        given = self.request.query_params.multi_items()
        out: dict[str, str] = {}
        for key, value in given:
            if key not in known:
                message = f"unknown query parameter {shown(key)}{nearest(key, list(known))}"
                raise Refusal("BadRequest", message, causes=[Cause(key[:200], "FieldValueNotSupported", message)])
            if key in out and out[key] != value:
                raise Refusal("BadRequest", f"the query parameter {key} is given twice")
            out[key] = value
        return out

    async def body(self, most_bytes: int = LARGEST_BODY) -> bytes:
        """The whole body. Raises Refusal when it is too large."""
        parts: list[bytes] = []
        length = 0
        async for part in self.request.stream():
            length += len(part)
            if length > most_bytes:
                reason = "FileTooLarge" if most_bytes == LARGEST_FILE else "RequestEntityTooLarge"
                raise Refusal(reason, f"a body may have {most_bytes} bytes at most")
            parts.append(part)
        return b"".join(parts)

    async def json(self, types: tuple[str, ...] = (JSON_TYPE,)) -> Any:
        """The body as JSON. Raises Refusal for another media type, or what is no JSON."""
        self.media_type(types)
        return decode(await self.body())

    def media_type(self, types: tuple[str, ...]) -> str:
        """The body's media type. Raises Refusal (UnsupportedMediaType)."""
        found = self.request.headers.get("content-type", types[0]).partition(";")[0].strip().lower()
        if found not in types:
            raise Refusal("UnsupportedMediaType", f"expected a body of type {' or '.join(types)}, found {shown(found)}")
        return found


def decode(data: bytes) -> Any:
    """JSON, however hostile. Raises Refusal (BadRequest)."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal("BadRequest", f"the body is not JSON: {ascii(str(error))[1:-1][:200]}") from None
    except RecursionError:
        raise Refusal("BadRequest", "the body is nested too deeply") from None


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), JSON_TYPE)


def refused(refusal: Refusal) -> Response:
    """A refusal as an answer."""
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    if refusal.reason == "Unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return answer(refusal.body(), refusal.code, headers)


Handler = Callable[[Asked], Awaitable[Response]]


def endpoint(
    on: Context, handler: Handler, *, roles: tuple[str, ...] = (USER, HEAD), writes: bool = True
) -> Callable[[Request], Awaitable[Response]]:
    """A handler behind the door: the key is checked, the project too, and everything that goes wrong becomes a Status.

    `roles`: whose keys are let in. `writes`: whether a method other than GET needs a database that takes writes.
    """

    async def serve(request: Request) -> Response:
        try:
            who = on.keys.who(request.headers.get("authorization"))
            if who.role not in roles:
                raise Refusal("Forbidden", f"this key is for another purpose; a {roles[0]}'s key is needed here")
            if "project" in request.path_params:
                who.check(request.path_params["project"])
            if writes and request.method not in ("GET", "HEAD") and on.records.store.trouble is not None:
                raise Refusal("Unavailable", on.records.store.trouble, retry_after_s=5)
            return await handler(Asked(on, request, who))
        except Refusal as refusal:
            return refused(refusal)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - the one place where what broke becomes an answer
            return refused(of_error(error))

    return serve


def of_error(error: Exception) -> Refusal:
    """What an error of a floor below means to a client."""
    if isinstance(error, StoreUnavailable):
        return Refusal("Unavailable", str(error), retry_after_s=5)
    if isinstance(error, SandboxGone):
        return Refusal("SandboxNotRunning", str(error))
    if isinstance(error, SandboxFileError):
        return file_refusal(error)
    if isinstance(error, ExecFailed) and error.errno == errno.EBUSY:
        return Refusal("Conflict", str(error))
    if isinstance(error, Unsupported):
        return Refusal("Unsupported", str(error))
    if isinstance(error, SandboxError):
        return Refusal("CapacityUnavailable", str(error), retry_after_s=5)
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        return Refusal("CapacityUnavailable", f"the server's machine is exhausted: {os.strerror(error.errno)}", retry_after_s=5)
    _log.error("a request failed", exc_info=error)
    return Refusal("InternalError", "the server made a mistake; its log says where")


def file_refusal(error: SandboxFileError) -> Refusal:
    """A path inside a sandbox that could not be used."""
    path = ascii(error.filename)[1:-1][:200] if error.filename is not None else ""
    said = f"{path}: {error.strerror}" if path else str(error)
    number = error.errno or errno.EIO
    causes = [Cause("path", errno.errorcode.get(number, "EIO"), os.strerror(number))]
    return Refusal(_FILE_REASONS.get(number, "BadRequest"), said, causes=causes)
