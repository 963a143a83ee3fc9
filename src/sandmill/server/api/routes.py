"""Every path of the API. In: the server's parts. Out: an ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from sandmill.server.api import (
    attaching,
    branching,
    describing,
    discovery,
    files,
    kept,
    layers,
    nodes,
    objects,
    processes,
    training,
    uploading,
)
from sandmill.server.api.context import Context, Handler, endpoint, refused
from sandmill.server.keys import HEAD, NODE
from sandmill.server.kinds import BETA, GROUP, KINDS, VERSION, VERSIONS, Kind
from sandmill.server.refusals import Refusal

_ROOT = f"/apis/{GROUP}/{VERSION}"
_PROJECT = f"{_ROOT}/namespaces/{{project}}"
_BLOBS = "/blobs/v1/namespaces/{project}"


def application(on: Context) -> Starlette:
    """The whole API."""
    routes: list[BaseRoute] = [Route("/healthz", _alive), Route("/livez", _alive)]
    for path, handler in _plain():
        routes.append(Route(path, endpoint(on, handler), methods=["GET"]))
    for kind in KINDS:
        routes.extend(_of_kind(on, kind))
    box, process = f"{_PROJECT}/sandboxes/{{name}}", f"{_PROJECT}/processes/{{name}}"
    job = f"/apis/{GROUP}/{BETA}/namespaces/{{project}}/trainingjobs/{{name}}"
    routes += [
        _methods(on, f"{box}/processes", {"POST": processes.create, "DELETE": processes.kill}),
        _methods(on, f"{box}/files", {"GET": files.get, "PUT": files.put, "DELETE": files.delete}),
        _methods(on, f"{box}/log", {"GET": processes.sandbox_log}),
        _methods(on, f"{box}/fork", {"POST": branching.fork}),
        _methods(on, f"{box}/freeze", {"POST": branching.freeze}),
        _methods(on, f"{box}/thaw", {"POST": branching.thaw}),
        _methods(on, f"{box}/blocked", {"GET": branching.blocked}),
        _methods(on, f"{_PROJECT}/images/{{name}}/log", {"GET": branching.image_log}),
        _methods(on, f"{process}/output", {"GET": processes.output}),
        _methods(on, f"{process}/stdin", {"POST": processes.stdin}),
        _methods(on, f"{process}/signals", {"POST": processes.signals}),
        _methods(on, f"{process}/log", {"GET": processes.process_log}),
        WebSocketRoute(f"{process}/attach", _attach(on)),
        _methods(on, f"{_BLOBS}/uploads", {"POST": uploading.announce}),
        Route(f"{_BLOBS}/blobs/{{digest}}", _take(on), methods=["PUT"]),
        _methods(on, f"{_BLOBS}/blobs/{{digest}}", {"GET": uploading.give}),
        _methods(on, f"{job}/taskevents", {"GET": training.taskevents}),
        _methods(on, f"{job}/outputs", {"GET": training.outputs}),
        _methods(on, f"{job}/outputs/{{path:path}}", {"GET": training.output}),
        Route(f"{box}/kept", endpoint(on, kept.get, roles=(HEAD,)), methods=["GET"]),
        Route(f"{box}/kept", endpoint(on, kept.put, roles=(HEAD,)), methods=["PUT"]),
        Route(f"{_ROOT}/nodes/{{name}}/beats", endpoint(on, nodes.beat, roles=(NODE,), writes=False), methods=["POST"]),
        Route(f"{_PROJECT}/supplies/{{digest}}", endpoint(on, layers.supply, roles=(HEAD,)), methods=["PUT"]),
        *_travelling(on, f"{_PROJECT}/stored", HEAD),
        *_travelling(on, f"{_ROOT}/nodes/{{name}}/stored", NODE),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _missing})


def _plain() -> list[tuple[str, Handler]]:
    return [
        ("/api", discovery.core),
        ("/apis", discovery.groups),
        (f"/apis/{GROUP}", discovery.group),
        *((f"/apis/{GROUP}/{version}", discovery.resources) for version in VERSIONS),
        ("/auth/whoami", discovery.whoami),
        ("/version", discovery.version),
        ("/readyz", discovery.ready),
        ("/openapi/v3", describing.index),
        *((f"/openapi/v3/apis/{GROUP}/{version}", describing.document) for version in VERSIONS),
    ]


def _of_kind(on: Context, kind: Kind) -> list[Route]:
    whole = {
        "get": ("GET", objects.read),
        "update": ("PUT", objects.replace),
        "patch": ("PATCH", objects.patch),
        "delete": ("DELETE", objects.delete),
    }
    many = {"list": ("GET", objects.listing), "create": ("POST", objects.create), "deletecollection": ("DELETE", objects.delete_many)}
    root = f"/apis/{kind.api_version}"
    base = f"{root}/namespaces/{{project}}/{kind.plural}" if kind.namespaced else f"{root}/{kind.plural}"
    on_many = {method: objects.on(kind, handler) for verb, (method, handler) in many.items() if verb in kind.verbs}
    on_one = {method: objects.on(kind, handler) for verb, (method, handler) in whole.items() if verb in kind.verbs}
    if kind.kind == "Process":
        on_one["GET"] = processes.get
    elif kind.kind == "Image":
        on_one["GET"] = branching.image
    if kind.kind == "Node":
        on_one |= {"PATCH": nodes.patch, "DELETE": nodes.delete}
        on_many, on_one = ({method: nodes.unbound(handler) for method, handler in part.items()} for part in (on_many, on_one))
    routes = [_methods(on, base, on_many), _methods(on, f"{base}/{{name}}", on_one)]
    if kind.namespaced:
        routes.append(_methods(on, f"{root}/{kind.plural}", {"GET": objects.on(kind, objects.listing)}))
    return routes


def _travelling(on: Context, base: str, role: str) -> list[Route]:
    """Images and layers for a machine of the other kind."""
    paths = {"images/{digest}": layers.image, "layers/{digest}": layers.layer, "layers/{digest}/pieces": layers.piece}
    return [Route(f"{base}/{path}", endpoint(on, handler, roles=(role,)), methods=["GET"]) for path, handler in paths.items()]


def _methods(on: Context, path: str, handlers: dict[str, Handler]) -> Route:
    """One path; which handler is the method's business."""
    served = {method: endpoint(on, handler) for method, handler in handlers.items()}

    async def serve(request: Request) -> Response:
        return await served[request.method if request.method != "HEAD" else "GET"](request)

    return Route(path, serve, methods=list(handlers))


def _attach(on: Context) -> Callable[[WebSocket], Awaitable[None]]:
    async def serve(socket: WebSocket) -> None:
        await attaching.attach(on, socket)

    return serve


def _take(on: Context) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return await uploading.take(on, request)

    return serve


async def _alive(request: Request) -> Response:
    return PlainTextResponse("ok")


async def _missing(request: Request, error: Exception) -> Response:
    """No such path or method, as a Status."""
    code = error.status_code if isinstance(error, HTTPException) else 404
    if code == 405:
        answered = refused(Refusal("MethodNotAllowed", f"{request.method} is not served at this path"))
        if isinstance(error, HTTPException) and error.headers:
            answered.headers.update(error.headers)
        return answered
    return refused(Refusal("NotFound", "there is nothing at this path"))
