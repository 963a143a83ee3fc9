"""The API's own description. In: the shapes that check requests. Out: OpenAPI v3, as `explain` and fuzzers read it."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response

from sandmill.server.api.branching import FORK
from sandmill.server.api.context import Asked, answer
from sandmill.server.api.uploading import UPLOAD
from sandmill.server.kinds import BETA, GROUP, KINDS, VERSION, VERSIONS, Kind
from sandmill.server.refusals import CODES
from sandmill.server.specs import METADATA
from sandmill.server.versions import VERSION_NUMBER

_PREFIX: Final = "dev.nodus.v1."
_NAME: Final = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[a-z0-9][-a-z0-9]{0,62}$"}}
_PROJECT: Final = {**_NAME, "name": "namespace"}
_WRITING: Final[list[dict[str, Any]]] = [
    {"name": "dryRun", "in": "query", "schema": {"type": "string", "enum": ["All"]}},
    {"name": "fieldValidation", "in": "query", "schema": {"type": "string", "enum": ["Ignore", "Warn", "Strict"]}},
]
"""The server is always strict; that it takes the second parameter tells kubectl to leave the checking to it."""
_REFUSAL: Final = {
    "type": "object",
    "required": ["host", "port", "reason", "count"],
    "properties": {
        "host": {"type": "string", "description": "A name or an address that was chosen inside the sandbox."},
        "port": {"type": "integer", "description": "53 for a name that was looked up."},
        "reason": {"type": "string"},
        "count": {"type": "integer"},
    },
}
_BLOCKED: Final = {"type": "object", "required": ["items"], "properties": {"items": {"type": "array", "items": _REFUSAL}}}
_ROOT: Final = f"/apis/{GROUP}/{VERSION}"


async def index(asked: Asked) -> Response:
    """GET /openapi/v3."""
    places = [f"apis/{GROUP}/{version}" for version in VERSIONS]
    return answer({"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}?hash={VERSION_NUMBER}"} for place in places}})


async def document(asked: Asked) -> Response:
    """GET the document of one version of the group."""
    return answer(described(asked.request.url.path.rstrip("/").rpartition("/")[2]))


def described(version: str) -> dict[str, Any]:
    """The whole document of a version."""
    schemas: dict[str, Any] = {_PREFIX + "Status": _status()}
    paths: dict[str, Any] = {}
    for kind in KINDS:
        if kind.version == version:
            schemas[_schema(kind)] = _object(kind)
            schemas[f"{_schema(kind)}List"] = _list(kind)
            paths.update(_paths(kind))
    if version == VERSION:
        paths.update(_streams())
        paths.update(_blobs())
    else:
        paths.update(_jobs())
    return {
        "openapi": "3.0.0",
        "info": {"title": "Sandmill", "version": VERSION_NUMBER},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _schema(kind: Kind) -> str:
    return f"dev.nodus.{kind.version}.{kind.kind}"


def _object(kind: Kind) -> dict[str, Any]:
    meta = METADATA.document()
    if "create" not in kind.verbs:  # the server names these: longer than a caller may
        meta["properties"]["name"] = {"type": "string", "maxLength": 253, "description": "The name."}
    properties: dict[str, Any] = {
        "apiVersion": {"type": "string", "enum": [kind.api_version], "description": "The version of this shape."},
        "kind": {"type": "string", "enum": [kind.kind], "description": "What it is."},
        "metadata": meta,
        "spec": kind.spec.document(),
        "status": {"type": "object", "description": "What is; written by the server."},
    }
    marks = [{"group": GROUP, "version": kind.version, "kind": kind.kind}]
    if kind.spec.fields:
        return {"type": "object", "description": kind.spec.about, "properties": properties, "x-kubernetes-group-version-kind": marks}
    return {"type": "object", "description": kind.spec.about, "x-kubernetes-group-version-kind": marks}


def _list(kind: Kind) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["items"],
        "properties": {"items": {"type": "array", "items": {"type": "object"}}, "metadata": {"type": "object"}},
    }


def _status() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["kind", "status", "message", "reason", "code"],
        "properties": {
            "kind": {"type": "string", "enum": ["Status"]},
            "status": {"type": "string", "enum": ["Success", "Failure"]},
            "message": {"type": "string"},
            "reason": {"type": "string", "enum": list(CODES)},
            "code": {"type": "integer"},
            "fix": {"type": "string"},
        },
    }


def _paths(kind: Kind) -> dict[str, Any]:
    root = f"/apis/{kind.api_version}"
    base = f"{root}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else f"{root}/{kind.plural}"
    marks = {"x-kubernetes-group-version-kind": {"group": GROUP, "version": kind.version, "kind": kind.kind}}
    reference = {"$ref": f"#/components/schemas/{_schema(kind)}"}
    many: dict[str, Any] = {}
    one: dict[str, Any] = {}
    selectors = [_query("labelSelector"), _query("fieldSelector"), _query("limit", {"type": "integer", "minimum": 0, "maximum": 1_000_000})]
    if "list" in kind.verbs:
        listed = {"$ref": f"#/components/schemas/{_schema(kind)}List"}
        many["get"] = _operation("list", kind.kind, {"200": listed}, selectors) | marks | {"x-kubernetes-action": "list"}
    if "create" in kind.verbs:
        made = {"200": reference, "201": reference}
        many["post"] = _operation("create", kind.kind, made, _WRITING, reference) | marks
    if "get" in kind.verbs:
        one["get"] = _operation("read", kind.kind, {"200": reference}, []) | marks
    if "update" in kind.verbs:
        one["put"] = _operation("replace", kind.kind, {"200": reference}, _WRITING, reference) | marks
    if "patch" in kind.verbs:
        patch = _operation("patch", kind.kind, {"200": reference}, _WRITING)
        patch["requestBody"] = {"required": True, "content": {"application/merge-patch+json": {"schema": reference}}}
        one["patch"] = patch | marks
    if "delete" in kind.verbs:
        one["delete"] = _operation("delete", kind.kind, {"200": {"type": "object"}}, []) | marks
    project = [_PROJECT] if kind.namespaced else []
    out = {base: {**many, "parameters": project}} if many else {}
    return out | ({f"{base}/{{name}}": {**one, "parameters": [*project, _NAME]}} if one else {})


def _streams() -> dict[str, Any]:
    """The subresources."""
    box, process = f"{_ROOT}/namespaces/{{namespace}}/sandboxes/{{name}}", f"{_ROOT}/namespaces/{{namespace}}/processes/{{name}}"
    both = {"parameters": [_PROJECT, _NAME]}
    sandbox, forks = {"$ref": f"#/components/schemas/{_PREFIX}Sandbox"}, {"$ref": f"#/components/schemas/{_PREFIX}SandboxList"}
    command = {"$ref": f"#/components/schemas/{_PREFIX}Process"}
    path = {**_query("path", {"type": "string", "minLength": 1, "maxLength": 4096}), "required": True}
    piece = {
        "type": "object",
        "properties": {"seq": {"type": "integer", "minimum": 0}, "data": {"type": "string"}, "eof": {"type": "boolean"}},
    }
    size = {"type": "object", "properties": {"rows": {"type": "integer"}, "cols": {"type": "integer"}}}
    asked = {"type": "object", "properties": {"signal": {"type": "string"}, "resize": size}}
    put = _operation("write", "File", {"200": {"type": "object"}}, [path, _query("expectedSHA256")])
    put["requestBody"] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    output = [_query("after", {"type": "integer", "minimum": 0}), _query("stream", {"type": "string", "enum": ["stdout", "stderr"]})]
    return {
        f"{box}/processes": {"post": _operation("run", "Process", {"201": command}, [], command), **both},
        f"{box}/files": {
            "get": _operation("read", "File", {"200": None}, [path]),
            "put": put,
            "delete": _operation("remove", "File", {"200": {"type": "object"}}, [path]),
            **both,
        },
        f"{box}/log": {"get": _operation("log", "Sandbox", {"200": None}, []), **both},
        f"{box}/fork": {"post": _operation("fork", "Sandbox", {"201": forks}, [], FORK.document()), **both},
        f"{box}/freeze": {"post": _operation("freeze", "Sandbox", {"200": sandbox}, []), **both},
        f"{box}/thaw": {"post": _operation("thaw", "Sandbox", {"200": sandbox}, []), **both},
        f"{box}/blocked": {"get": _operation("blocked", "Sandbox", {"200": _BLOCKED}, []), **both},
        f"{_ROOT}/namespaces/{{namespace}}/images/{{name}}/log": {"get": _operation("log", "Image", {"200": None}, []), **both},
        f"{process}/output": {"get": _operation("output", "Process", {"200": None}, output), **both},
        f"{process}/stdin": {"post": _operation("stdin", "Process", {"200": {"type": "object"}}, [], piece), **both},
        f"{process}/signals": {"post": _operation("signal", "Process", {"200": {"type": "object"}}, [], asked), **both},
        f"{process}/log": {"get": _operation("log", "Process", {"200": None}, []), **both},
    }


def _jobs() -> dict[str, Any]:
    """What belongs to training jobs."""
    job = f"/apis/{GROUP}/{BETA}/namespaces/{{namespace}}/trainingjobs/{{name}}"
    asked = [
        _query("eventType", {"type": "string", "enum": ["Metrics", "Task"]}),
        _query("phase", {"type": "string", "enum": ["Baseline", "Training", "Evaluation"]}),
        _query("after"),
        _query("limit", {"type": "integer", "minimum": 0, "maximum": 1000}),
    ]
    listed = {"type": "object", "required": ["items"], "properties": {"items": {"type": "array", "items": {"type": "object"}}}}
    path = {**_NAME, "name": "path", "schema": {"type": "string"}}
    both = {"parameters": [_PROJECT, _NAME]}
    return {
        f"{job}/taskevents": {"get": _operation("taskevents", "TrainingJob", {"200": listed}, asked), **both},
        f"{job}/outputs": {"get": _operation("outputs", "TrainingJob", {"200": listed}, []), **both},
        f"{job}/outputs/{{path}}": {
            "get": _operation("output", "TrainingJob", {"200": None}, []),
            "parameters": [_PROJECT, _NAME, path],
        },
    }


def _blobs() -> dict[str, Any]:
    """Uploads; the bytes themselves go to the URL of the answer."""
    place = "/blobs/v1/namespaces/{namespace}"
    digest = {**_NAME, "name": "digest", "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}
    granted = {"type": "object", "required": ["exists"], "properties": {"exists": {"type": "boolean"}, "url": {"type": "string"}}}
    announce = _operation("announce", "Blob", {"200": granted, "201": granted}, [], UPLOAD.document())
    return {
        f"{place}/uploads": {"post": announce, "parameters": [_PROJECT]},
        f"{place}/blobs/{{digest}}": {"get": _operation("read", "Blob", {"200": None}, []), "parameters": [_PROJECT, digest]},
    }


def _query(name: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema or {"type": "string"}}


def _operation(
    verb: str, kind: str, answers: dict[str, Any], parameters: list[dict[str, Any]], body: dict[str, Any] | None = None
) -> dict[str, Any]:
    status = {"description": "a refusal", "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{_PREFIX}Status"}}}}
    responses: dict[str, Any] = {}
    for code, schema in answers.items():
        content = {} if schema is None else {"content": {"application/json": {"schema": schema}}}
        responses[code] = {"description": "done", **content}
    out: dict[str, Any] = {"operationId": f"{verb}{kind}", "parameters": parameters, "responses": {**responses, "default": status}}
    if body is not None:
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return out
