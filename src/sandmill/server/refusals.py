"""What the API says when it will not do something. In: a reason and its causes. Out: a `metav1.Status` body with its HTTP code.

One exception, `Refusal`, carries every such answer from wherever it is found to the one place that writes it.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

CODES: Final[Mapping[str, int]] = {
    "BadRequest": 400,
    "Unauthorized": 401,
    "BudgetExceeded": 402,
    "Forbidden": 403,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "NotAcceptable": 406,
    "AlreadyExists": 409,
    "Conflict": 409,
    "FieldImmutable": 409,
    "IdempotencyKeyReused": 409,
    "RequestInProgress": 409,
    "SandboxNotRunning": 409,
    "SandboxFailed": 409,
    "Expired": 410,
    "PreconditionFailed": 412,
    "SHA256Mismatch": 412,
    "FileTooLarge": 413,
    "RequestEntityTooLarge": 413,
    "UnsupportedMediaType": 415,
    "Invalid": 422,
    "ImageNotFound": 422,
    "Unsupported": 422,
    "QuotaExceeded": 429,
    "StdinBackpressure": 429,
    "InternalError": 500,
    "CapacityUnavailable": 503,
    "SandboxStarting": 503,
    "Unavailable": 503,
}
EXHAUSTED: Final = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""What a machine, or a sandbox, answers that has nothing left of something."""
LONGEST_SHOWN: Final = 200
"""Characters of a caller's own words that an answer repeats."""


class Cause(msgspec.Struct, frozen=True):
    """One field that is wrong: its path, a reason a program can test, and a sentence with the nearest valid value."""

    field: str
    reason: str
    message: str


class Refusal(Exception):
    """An answer other than success. `reason` is a key of `CODES`."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        causes: Sequence[Cause] = (),
        fix: str | None = None,
        retry_after_s: int | None = None,
        kind: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.causes = tuple(causes)
        self.fix = fix
        self.retry_after_s = retry_after_s
        self.kind = kind
        self.name = name

    @property
    def code(self) -> int:
        """The HTTP status."""
        return CODES[self.reason]

    def body(self) -> dict[str, Any]:
        """The `metav1.Status` object."""
        details: dict[str, Any] = {}
        if self.name is not None:
            details["name"] = self.name
        if self.kind is not None:
            details |= {"group": "nodus.dev", "kind": self.kind}
        if self.causes:
            details["causes"] = [msgspec.structs.asdict(cause) for cause in self.causes]
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if details:
            status["details"] = details
        if self.fix is not None:
            status["fix"] = self.fix
        return status


def invalid(kind: str, name: str, causes: Sequence[Cause]) -> Refusal:
    """All that is wrong with one object, in one answer."""
    shown = "; ".join(f"{cause.field}: {cause.message}" for cause in causes[:5])
    more = f"; and {len(causes) - 5} more" if len(causes) > 5 else ""
    return Refusal("Invalid", f"{kind} {shown_name(name)} is invalid: {shown}{more}", causes=causes[:50], kind=kind, name=name[:253])


def not_found(kind: str, name: str) -> Refusal:
    """No such object."""
    return Refusal("NotFound", f"there is no {kind} {shown_name(name)}", kind=kind, name=name[:253])


def shown_name(name: str) -> str:
    """A caller's word as an answer repeats it: quoted, ASCII, cut."""
    return f"{name[:LONGEST_SHOWN]!a}" + ("..." if len(name) > LONGEST_SHOWN else "")
