"""Changes to objects. In: a patch and its media type. Out: the changed object; or the paths in which two objects differ."""

from __future__ import annotations

import copy
from typing import Any, Final

import jsonpatch
import jsonpointer

from sandmill.server.refusals import Refusal
from sandmill.server.schema import shown

MERGE: Final = "application/merge-patch+json"
OPERATIONS: Final = "application/json-patch+json"
_MOST_OPERATIONS: Final = 1000
_LARGEST: Final = 2 << 20


def patched(value: Any, patch: Any, media_type: str) -> Any:
    """The object after the patch. Raises Refusal (BadRequest, Invalid)."""
    if media_type == MERGE:
        if not isinstance(patch, dict):
            raise Refusal("BadRequest", f"a merge patch is an object, found {shown(patch)}")
        return merged(value, patch)
    if not isinstance(patch, list) or len(patch) > _MOST_OPERATIONS:
        raise Refusal("BadRequest", f"a JSON patch is a list of at most {_MOST_OPERATIONS} operations")
    try:
        return _applied(value, patch)
    except jsonpatch.JsonPatchTestFailed as error:
        raise Refusal("Invalid", f"a test of the JSON patch failed: {ascii(str(error))[1:200]}") from error
    except (
        jsonpatch.JsonPatchException,
        jsonpointer.JsonPointerException,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise Refusal("BadRequest", f"the JSON patch cannot be applied: {ascii(str(error))[1:200]}") from error


def _applied(value: Any, patch: list[Any]) -> Any:
    """One operation after the other, so that copies of copies cannot grow without bound."""
    work = copy.deepcopy(value)
    room = _LARGEST
    for operation in patch:
        if isinstance(operation, dict) and operation.get("op") == "copy":
            source = jsonpointer.resolve_pointer(work, operation.get("from", ""))
            room -= len(repr(source))
            if room < 0:
                raise Refusal("RequestEntityTooLarge", "the JSON patch copies too much")
        work = jsonpatch.apply_patch(work, [operation], in_place=True)
    return work


def merged(value: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    out = dict(value) if isinstance(value, dict) else {}
    for key, part in patch.items():
        if part is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), part)
    return out


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    """Dotted paths in which two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        out: list[str] = []
        for key in sorted({*before, *after}):
            place = f"{at}.{key}" if at else str(key)
            if key not in before or key not in after:
                out.append(place)
            else:
                out.extend(differences(before[key], after[key], place))
        return out
    return [] if before == after else [at]
