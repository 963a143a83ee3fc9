"""What may be stored. In: an object as a caller wrote it, and the stored one it would replace. Out: the object to store, or a refusal.

Checks that concern one kind only are here too, each in its function, so that the request handlers know kinds only by name.
"""

from __future__ import annotations

from typing import Any, Final

from sandmill.server import layer
from sandmill.server.costs import microusd
from sandmill.server.kinds import Kind
from sandmill.server.patching import differences
from sandmill.server.records import Value, fresh
from sandmill.server.refusals import Cause, Refusal, invalid
from sandmill.server.schema import UNSUPPORTED, Causes, nearest, shown
from sandmill.server.specs import METADATA
from sandmill.server.statuses import expiry, first_status
from sandmill.server.training_manifest import as_before

_TOP: Final = ("apiVersion", "kind", "metadata", "spec", "status")
PENDING: Final = ("Image", "Environment", "TrainingJob")
"""Kinds that are made once they are stored."""
_OURS: Final = ("uid", "generation", "creationTimestamp", "deletionTimestamp", "selfLink", "managedFields", "ownerReferences", "finalizers")


def checked(kind: Kind, body: Any, project: str | None) -> Value:
    """A caller's object, every field of it checked. Raises Refusal with all causes."""
    if not isinstance(body, dict):
        raise Refusal("BadRequest", f"expected a {kind.kind} object, found {shown(body)}")
    causes = Causes()
    for key, expected in (("apiVersion", kind.api_version), ("kind", kind.kind)):
        if body.get(key, expected) != expected:
            causes.add(key, "FieldValueInvalid", f"expected {expected}, found {shown(body[key])}")
    for key in body:
        if key not in _TOP:
            causes.add(_path(key), "FieldValueNotSupported", f"unknown field {shown(key)}{nearest(key, list(_TOP))}")
    given = body.get("metadata")
    meta: Any = {} if given is None else given
    if isinstance(meta, dict):
        meta = {key: part for key, part in meta.items() if key not in _OURS}
    meta = METADATA.check(meta, "metadata", causes)
    spec = kind.spec.check({} if body.get("spec") is None else body["spec"], "spec", causes)
    name = str(meta.get("name") or meta.get("generateName") or "") if isinstance(meta, dict) else ""
    if causes.found:
        refusal = invalid(kind.plural, name, causes.found)
        if all(cause.reason == UNSUPPORTED for cause in causes.found):
            refusal.reason = UNSUPPORTED
        raise refusal
    if meta.get("namespace", project) != project:
        raise Refusal("BadRequest", f"metadata.namespace is {meta['namespace']!r}, the request's project is {project!r}")
    return {"metadata": meta, "spec": spec}


def new(kind: Kind, given: Value, project: str | None, name: str) -> Value:
    """A checked object with its identity and first status."""
    meta = {key: part for key, part in given["metadata"].items() if key in ("labels", "annotations")}
    value = fresh(kind.kind, name, project, given["spec"], **meta)
    if kind.kind == "Sandbox":
        value["status"] = first_status(value)
    elif kind.kind in PENDING:
        value["status"] = {"phase": "Pending"}
    return value


def admit_sandbox(spec: Value, rate: int | None) -> None:
    """Whether this server can have such a sandbox at all. Raises Refusal."""
    layer.check(spec)
    if spec.get("args") and not spec.get("command"):
        raise invalid("sandboxes", "", [Cause("spec.args", "FieldValueInvalid", "arguments need a command")])
    if spec.get("maxCostUSD") is not None and rate is None:
        message = "the price book has no price for sandboxes, so a cap could not be kept; add hours.sandbox to it"
        raise invalid("sandboxes", "", [Cause("spec.maxCostUSD", "FieldValueInvalid", message)])


def replaced(kind: Kind, before: Value, given: Value) -> Value:
    """The stored object with a caller's labels, annotations and changeable fields. Raises Refusal."""
    meta = given["metadata"]
    name = before["metadata"]["name"]
    if meta.get("name", name) != name:
        raise invalid(kind.plural, name, [Cause("metadata.name", "FieldValueInvalid", f"must be {name!r}, as in the path")])
    if kind.kind == "Sandbox":
        given = {**given, "spec": {"workingDir": before["spec"]["workingDir"], **given["spec"]}}
    elif kind.kind == "TrainingJob":
        given = {**given, "spec": as_before(given["spec"], before["spec"])}
    version = before["metadata"]["resourceVersion"]
    if meta.get("resourceVersion", version) != version:
        raise Refusal("Conflict", f"{kind.plural} {name!r} has changed since version {meta['resourceVersion']}; read it again", name=name)
    fixed = [path for path in differences(before.get("spec", {}), given["spec"]) if path.split(".")[0].split("[")[0] not in kind.mutable]
    if kind.kind == "Environment" and _newer(before["spec"]["version"], given["spec"]["version"]):
        fixed = []
    if fixed:
        way = "; write a higher spec.version" if kind.kind == "Environment" else ""
        causes = [Cause(f"spec.{path}", "FieldImmutable", f"cannot change after creation{way}") for path in fixed]
        message = f"{kind.plural} {name!r}: {', '.join(cause.field for cause in causes[:5])} cannot change after creation"
        raise Refusal("FieldImmutable", message, causes=causes, kind=kind.plural, name=name)
    if kind.kind == "Sandbox":
        _only_raised(before, given["spec"])
    kept = {key: part for key, part in before["metadata"].items() if key not in ("labels", "annotations")}
    changed = {key: meta[key] for key in ("labels", "annotations") if meta.get(key)}
    after = {**before, "metadata": {**kept, **changed}, "spec": given["spec"]}
    if before.get("spec") != given["spec"]:
        after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
    if kind.kind == "Sandbox":
        after["status"] = {**before["status"], "expirationTime": expiry(after)}
    elif kind.kind == "Environment" and before["spec"]["version"] != given["spec"]["version"]:
        after["status"] = {"phase": "Pending"}
    return after


def _newer(before: str, given: str) -> bool:
    """Whether a version comes after another (SemVer 2, clause 11)."""

    def rank(version: str) -> tuple[object, ...]:
        numbers, _, rest = version.partition("+")[0].partition("-")
        words = [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in rest.split(".")]
        return ([int(part) for part in numbers.split(".")], not rest, words)

    return rank(given) > rank(before)


def _only_raised(before: Value, spec: Value) -> None:
    old, fresh_cap = before["spec"].get("maxCostUSD"), spec.get("maxCostUSD")
    if old is None or (fresh_cap is not None and microusd(fresh_cap) >= microusd(old)):
        return
    found = "nothing" if fresh_cap is None else shown(fresh_cap)
    message = f"may only be raised: it is {old}, found {found}"
    raise invalid("sandboxes", before["metadata"]["name"], [Cause("spec.maxCostUSD", "FieldValueInvalid", message)])


def same(kind: Kind, before: Value, given: Value) -> list[str]:
    """Paths in which a create differs from what exists; none: it is the same object."""
    ours, theirs = dict(before.get("spec", {})), dict(given["spec"])
    for part in (ours, theirs):
        part.pop("state", None)
    return differences(ours, theirs)


def _path(key: Any) -> str:
    return ascii(key)[1:-1][:200]
