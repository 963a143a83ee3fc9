"""Objects by name. In: GET, POST, PUT, PATCH, DELETE on a kind's paths. Out: the objects, and what their controllers are told."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.responses import Response

from sandmill.config.quantities import parse_duration
from sandmill.server.admission import admit_sandbox, checked, new, replaced, same
from sandmill.server.api.context import Asked, answer, decode
from sandmill.server.api.selecting import selection
from sandmill.server.api.tables import table, wants_table
from sandmill.server.api.usage import summary, within
from sandmill.server.api.watching import watch
from sandmill.server.costs import book_version, microusd, usd
from sandmill.server.kinds import Kind
from sandmill.server.patching import MERGE, OPERATIONS, patched
from sandmill.server.records import Value
from sandmill.server.refusals import Cause, Refusal, invalid, not_found
from sandmill.server.schema import shown
from sandmill.server.statuses import REQUESTED
from sandmill.server.tables import Forget

START: Final = "nodus.dev/start-requested-at"
AGAIN: Final = ("Image", "Environment")
"""Kinds that are made again when a failed one is created again."""
_WRITE_QUERY: Final = ("dryRun", "fieldManager", "fieldValidation", "force", "pretty")
_LIST_QUERY: Final = (
    *("labelSelector", "fieldSelector", "limit", "continue", "resourceVersion", "resourceVersionMatch", "watch"),
    *("timeoutSeconds", "allowWatchBookmarks", "sendInitialEvents", "includeObject", "pretty"),
)
_USAGE_QUERY: Final = ("groupBy", "since", "until", "object")
_DELETE_FIELDS: Final = ("apiVersion", "kind", "gracePeriodSeconds", "preconditions", "orphanDependents", "propagationPolicy", "dryRun")


def projects_of(asked: Asked, kind: Kind) -> str | None:
    """The project a request is about: None for all, "" for kinds that belong to none."""
    if not kind.namespaced:
        return ""
    return asked.request.path_params.get("project")


def find(asked: Asked, kind: Kind) -> Value:
    """The object a path names. Raises Refusal (NotFound)."""
    value = asked.on.records.get(kind.kind, projects_of(asked, kind) or "", asked.name)
    if value is None or not asked.may_see(value):
        raise not_found(kind.plural, asked.name)
    return value


def shown_value(asked: Asked, kind: Kind, value: Value) -> Value:
    """The object as it is answered."""
    if kind.kind == "Node":
        return asked.on.nodes.shown(value)
    return asked.on.boxes.shown(value) if kind.kind == "Sandbox" else value


async def read(asked: Asked, kind: Kind) -> Response:
    """GET of one object, as itself or as a table."""
    query = asked.query((*_LIST_QUERY, "wait"))
    value = shown_value(asked, kind, find(asked, kind))
    if wants_table(asked.request.headers.get("accept", "")):
        meta = {"resourceVersion": value["metadata"]["resourceVersion"]}
        return answer(table(kind, [value], meta, query.get("includeObject", "Metadata")))
    return answer(value)


async def listing(asked: Asked, kind: Kind) -> Response:
    """GET of a collection: a list, a table, or a watch."""
    query = asked.query((*_LIST_QUERY, *_USAGE_QUERY) if kind.kind == "UsageRecord" else _LIST_QUERY)
    chosen = selection(query.get("labelSelector"), query.get("fieldSelector"))
    project = projects_of(asked, kind)
    if query.get("watch", "false").lower() in ("true", "1"):
        return await watch(asked, kind, project, chosen, query)
    limit = _number(query, "limit", 0, 0, 1_000_000) or None
    version = asked.on.records.version
    values = [
        value
        for value in asked.on.records.list(kind.kind, project)
        if asked.may_see(value) and chosen.holds(shown_value(asked, kind, value))
    ]
    if kind.kind == "UsageRecord":
        values = within(values, query)
        if query.get("groupBy"):
            return answer(summary(values, query["groupBy"], version))
    values = _after(values, query.get("continue"))
    meta: dict[str, Any] = {"resourceVersion": str(version)}
    if limit is not None and len(values) > limit:
        last = values[limit - 1]["metadata"]
        token = f"{last.get('namespace', '')}/{last['name']}"
        meta |= {"continue": base64.urlsafe_b64encode(token.encode()).decode(), "remainingItemCount": len(values) - limit}
        values = values[:limit]
    values = [shown_value(asked, kind, value) for value in values]
    if wants_table(asked.request.headers.get("accept", "")):
        return answer(table(kind, values, meta, query.get("includeObject", "Metadata")))
    return answer({"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": meta, "items": values})


async def create(asked: Asked, kind: Kind) -> Response:
    """POST: one object. The same request again, or the same object under its name, finds what is there."""
    query = asked.query(_WRITE_QUERY)
    dry = _dry(query)
    body = await asked.body()
    asked.media_type(("application/json",))
    key = None if dry else asked.request.headers.get("idempotency-key")
    path = asked.request.url.path.encode()
    with await asked.on.answers.turn(asked.who.digest, key, path + b"\0" + body) as turn:
        if turn.before is not None:
            return Response(turn.before.body, turn.before.status, {"Idempotent-Replayed": "true"}, "application/json")
        given = checked(kind, decode(body), asked.project)
        name, existing = _name(asked, kind, given)
        if kind.kind == "Sandbox":
            given["spec"] = asked.on.catalog.complete(asked.project, given["spec"], existing)
        elif kind.kind == "TrainingJob":
            given["spec"] = asked.on.training.complete(asked.project, given["spec"], existing)
        if existing is not None:
            return await _reconnect(asked, kind, existing, given, dry)
        extra: list[Any] = []
        maker = asked.on.maker(kind.kind)
        value = new(kind, given, asked.project, name)
        if kind.kind == "Sandbox":
            admit_sandbox(value["spec"], asked.on.boxes.rate(value["spec"]))
            asked.on.secrets.check(value["spec"], asked.project)
            if (pinned := asked.on.catalog.pin(value)) is not None:
                value["status"]["image"] = pinned
        elif maker is not None:
            maker.admit(asked.project, value["spec"])
        elif kind.kind == "Secret":
            value, extra = asked.on.secrets.take(value, None, asked.who.name)
        _check_quota(asked, kind)
        if kind.kind == "Sandbox" and value["spec"]["state"] == "Running":
            asked.on.boxes.check_quota(asked.project, name)
            asked.on.boxes.places.check_room(value["spec"])
        tag = _etag(asked, value)
        if (expected := asked.request.headers.get("if-match")) is not None and expected != tag:
            raise Refusal("PreconditionFailed", "the estimate that If-Match names is no longer current; ask for another with dryRun=All")
        if dry:
            return answer(_estimated(asked, kind, value), 201, {"ETag": tag})
        if kind.kind == "TrainingJob":
            asked.on.training.check_now(asked.project, value["spec"])
        stored = await asked.on.records.save(
            kind.kind, asked.project, value, *extra, answer=lambda made: turn.answer(201, msgspec.json.encode(made))
        )
        if kind.kind == "Sandbox" and value["spec"]["state"] == "Running":
            asked.on.boxes.soon(asked.on.boxes.start(asked.project, name))
        elif maker is not None:
            maker.soon(stored)
        return answer(stored, 201)


async def replace(asked: Asked, kind: Kind) -> Response:
    """PUT."""
    query = asked.query(_WRITE_QUERY)
    return await _change(asked, kind, await asked.json(), dry=_dry(query))


async def patch(asked: Asked, kind: Kind) -> Response:
    """PATCH, RFC 7386 or RFC 6902."""
    query = asked.query(_WRITE_QUERY)
    media_type = asked.media_type((MERGE, OPERATIONS))
    change = decode(await asked.body())
    before = find(asked, kind)
    return await _change(asked, kind, patched(before, change, media_type), dry=_dry(query))


async def delete(asked: Asked, kind: Kind) -> Response:
    """DELETE of one object; it is gone when this answers, unless its sandbox takes longer than some seconds to end."""
    dry = await _delete_options(asked, kind, find(asked, kind))
    value = find(asked, kind)
    if not dry:
        await _remove(asked, kind, value)
    meta = value["metadata"]
    details = {"name": meta["name"], "group": "nodus.dev", "kind": kind.plural, "uid": meta["uid"]}
    return answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})


async def delete_many(asked: Asked, kind: Kind) -> Response:
    """DELETE of a collection, or of those that selectors choose."""
    query = asked.query((*_LIST_QUERY, "dryRun", "propagationPolicy", "gracePeriodSeconds"))
    chosen = selection(query.get("labelSelector"), query.get("fieldSelector"))
    dry = await _delete_options(asked, kind, None) or _dry(query)
    values = [value for value in asked.on.records.list(kind.kind, asked.project) if chosen.holds(shown_value(asked, kind, value))]
    for value in values:
        if not dry:
            await _remove(asked, kind, value)
    meta = {"resourceVersion": str(asked.on.records.version)}
    return answer({"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": meta, "items": values})


def on(kind: Kind, handler: Callable[[Asked, Kind], Awaitable[Response]]) -> Callable[[Asked], Awaitable[Response]]:
    """A handler of one kind."""

    async def serve(asked: Asked) -> Response:
        return await handler(asked, kind)

    return serve


async def _change(asked: Asked, kind: Kind, body: Any, *, dry: bool) -> Response:
    before = find(asked, kind)
    given = checked(kind, body, asked.project)
    extra: list[Any] = []
    values = {key: given["spec"].pop(key) for key in ("data", "stringData") if kind.kind == "Secret" and key in given["spec"]}
    value = replaced(kind, before, given)
    if kind.kind == "Environment" and value["spec"]["version"] != before["spec"]["version"]:
        asked.on.environments.admit(asked.project, value["spec"])
    if values:
        value = {**value, "spec": {**value["spec"], **values}}
        value, extra = asked.on.secrets.take(value, before, asked.who.name)
    elif kind.kind == "TrainingJob":
        asked.on.training.check_change(before, value)
    if kind.kind == "Sandbox" and "deletionTimestamp" in before["metadata"]:
        raise Refusal("SandboxNotRunning", f"sandbox {asked.name!r} is being deleted", kind=kind.plural, name=asked.name)
    if dry or (value == before and not extra):
        return answer(shown_value(asked, kind, value))
    if kind.kind == "Sandbox":
        value = _asked_to_start(before, value)
        if _starts(before, value):
            value = asked.on.boxes.starting(value)
    stored = await asked.on.records.save(kind.kind, asked.project, value, *extra)
    if kind.kind == "Sandbox":
        stored = _act(asked, before, stored)
    elif kind.kind == "Environment" and stored["status"]["phase"] == "Pending":
        asked.on.environments.soon(stored)
    elif kind.kind == "TrainingJob":
        await asked.on.training.changed(before, stored)
        stored = find(asked, kind)
    elif kind.kind == "Process" and value["spec"].get("state") == "Cancelled":
        await asked.on.commands.cancel(value)
        stored = find(asked, kind)
    return answer(shown_value(asked, kind, stored))


def _asked_to_start(before: Value, value: Value) -> Value:
    """Takes note of a start that an annotation asks for."""
    wish = value["metadata"].get("annotations", {}).get(START)
    if wish is None or before["metadata"].get("annotations", {}).get(START) == wish:
        return value
    handled = {**value["status"].get("handledRequests", {}), START: wish}
    return {**value, "spec": {**value["spec"], "state": "Running"}, "status": {**value["status"], "handledRequests": handled}}


def _starts(before: Value, value: Value) -> bool:
    """Whether a change asks for a start."""
    wish = before["status"].get("handledRequests") != value["status"].get("handledRequests")
    return bool(value["spec"]["state"] == "Running" and (before["spec"]["state"] == "Stopped" or wish))


def _act(asked: Asked, before: Value, value: Value) -> Value:
    """Tells the controller what a changed Sandbox asks for."""
    boxes, name = asked.on.boxes, asked.name
    boxes.limits_changed(value)
    if value["spec"]["state"] == "Stopped" and before["spec"]["state"] == "Running":
        boxes.soon(boxes.stop(asked.project, name, REQUESTED))
    elif _starts(before, value):
        boxes.soon(boxes.start(asked.project, name))
    return value


async def _reconnect(asked: Asked, kind: Kind, existing: Value, given: Value, dry: bool) -> Response:
    """A named create of what exists: the same object answers, and a stopped sandbox wakes."""
    name = existing["metadata"]["name"]
    different = same(kind, existing, given) if kind.kind != "Secret" else ["data"]
    if different:
        causes = [Cause(f"spec.{path}", "FieldValueDuplicate", "differs from the object of that name") for path in different]
        message = f"{kind.plural} {name!r} exists already with another spec: {', '.join(cause.field for cause in causes[:5])}"
        raise Refusal("AlreadyExists", message, causes=causes, kind=kind.plural, name=name)
    if "deletionTimestamp" in existing["metadata"]:
        raise Refusal("AlreadyExists", f"{kind.plural} {name!r} is being deleted; try again in a moment", kind=kind.plural, name=name)
    if kind.kind == "Sandbox" and given["spec"]["state"] == "Running" and not dry:
        waking = asked.on.boxes.starting({**existing, "spec": {**existing["spec"], "state": "Running"}})
        if waking != existing:
            existing = await asked.on.records.save(kind.kind, asked.project, waking)
        if existing["status"]["phase"] != "Failed":
            asked.on.boxes.soon(asked.on.boxes.start(asked.project, name))
    elif kind.kind in AGAIN and (maker := asked.on.maker(kind.kind)) is not None and existing["status"]["phase"] == "Failed" and not dry:
        existing = await asked.on.records.save(kind.kind, asked.project, {**existing, "status": {"phase": "Pending"}})
        maker.soon(existing)
    return answer(shown_value(asked, kind, existing))


def _name(asked: Asked, kind: Kind, given: Value) -> tuple[str, Value | None]:
    meta = given["metadata"]
    if "name" in meta:
        return meta["name"], asked.on.records.get(kind.kind, asked.project, meta["name"])
    if "generateName" not in meta:
        causes = [Cause("metadata.name", "FieldValueRequired", "name or generateName must be given")]
        raise invalid(kind.plural, "", causes)
    return asked.on.records.free_name(kind.kind, asked.project, meta["generateName"]), None


def _check_quota(asked: Asked, kind: Kind) -> None:
    most = asked.on.settings.max_objects
    if asked.on.records.count(kind.kind, asked.project) >= most:
        message = f"project {asked.project!r} has {most} {kind.plural}, which is its quota"
        raise Refusal("QuotaExceeded", message, retry_after_s=10, fix="delete some", kind=kind.plural)


def _estimated(asked: Asked, kind: Kind, value: Value) -> Value:
    """The object with `status.estimate`: the hourly rate is certain, the total is the most it can come to."""
    if kind.kind == "TrainingJob":
        return {**value, "status": {**value["status"], "estimate": asked.on.training.estimate(asked.project, value["spec"])}}
    if kind.kind != "Sandbox":
        return value
    rate = asked.on.boxes.rate(value["spec"])
    estimate: dict[str, Any] = {"pricebookVersion": book_version(asked.on.settings.prices), "blockingReasons": []}
    if rate is not None:
        most = round(rate * parse_duration(value["spec"]["lifecycle"]["maxLifetime"]) / 3600)
        if (limit := value["spec"].get("maxCostUSD")) is not None:
            most = min(most, microusd(limit))
        estimate |= {"rateUSDPerHour": usd(rate), "holdUSD": usd(most), "costUSD": {"p90": usd(most)}}
        estimate["placementPreview"] = {"offering": "sandbox", "interruptible": False, "regionClass": "local"}
    return {**value, "status": {**value["status"], "estimate": estimate}}


def _etag(asked: Asked, value: Value) -> str:
    said = msgspec.json.encode([value["spec"], book_version(asked.on.settings.prices)], order="sorted")
    return f'"{hashlib.sha256(said).hexdigest()[:32]}"'


async def _delete_options(asked: Asked, kind: Kind, value: Value | None) -> bool:
    """Whether it is a dry run. Raises Refusal for preconditions that do not hold."""
    if value is not None:
        query = asked.query(("dryRun", "propagationPolicy", "gracePeriodSeconds", "orphanDependents", "confirm", "pretty"))
    else:
        query = {}
    body = await asked.body()
    options = decode(body) if body else {}
    if not isinstance(options, dict):
        raise Refusal("BadRequest", f"expected DeleteOptions, found {shown(options)}")
    for key in options:
        if key not in _DELETE_FIELDS:
            raise Refusal("BadRequest", f"unknown field {shown(key)} of DeleteOptions")
    wanted = options.get("preconditions") or {}
    if not isinstance(wanted, dict):
        raise Refusal("BadRequest", f"expected preconditions, found {shown(wanted)}")
    for key in ("uid", "resourceVersion"):
        if value is not None and wanted.get(key) is not None and wanted[key] != value["metadata"][key]:
            raise Refusal("Conflict", f"{kind.plural} {value['metadata']['name']!r} has another {key}", name=value["metadata"]["name"])
    dry = options.get("dryRun")
    if dry not in (None, [], ["All"]):
        raise Refusal("BadRequest", f'dryRun is ["All"] or nothing, found {shown(dry)}')
    return bool(dry) or _dry(query)


async def _remove(asked: Asked, kind: Kind, value: Value) -> None:
    meta = value["metadata"]
    if kind.kind == "Sandbox":
        await asked.on.boxes.delete(meta["namespace"], meta["name"])
        return
    if (done := asked.on.records.remove(kind.kind, meta["namespace"], meta["name"], Forget(meta["uid"]))) is not None:
        await asked.on.records.store.durable(done)
        if (maker := asked.on.maker(kind.kind)) is not None:
            await maker.forget(value)


def _dry(query: Any) -> bool:
    found = query.get("dryRun")
    if found not in (None, "", "All"):
        raise Refusal("BadRequest", f"dryRun is All or nothing, found {shown(found)}")
    return bool(found == "All")


def _number(query: Any, key: str, default: int, least: int, most: int) -> int:
    text = query.get(key)
    if text is None or text == "":
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text[:12]) <= most:
        raise Refusal("BadRequest", f"{key} is a whole number from {least} to {most}, found {shown(text)}")
    return int(text)


def _after(values: list[Value], token: str | None) -> list[Value]:
    """What follows a `continue` token."""
    if not token:
        return values
    try:
        project, slash, name = base64.b64decode(token.encode(), b"-_", validate=True).decode().partition("/")
        if not slash or not name:
            raise ValueError(token)
    except ValueError:
        raise Refusal("BadRequest", "the continue token is none of this server's; list again without it") from None
    return [value for value in values if (value["metadata"].get("namespace", ""), value["metadata"]["name"]) > (project, name)]
