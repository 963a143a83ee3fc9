"""What a Sandbox's status says. In: objects and reasons. Out: conditions, first statuses, expiry, sentences."""

from __future__ import annotations

from typing import Any, Final

from sandmill.config.quantities import parse_duration
from sandmill.server.live import CAP, IDLE, LIFETIME, LOST
from sandmill.server.records import Value, now, seconds_of, stamp

REQUESTED: Final = "Requested"
SHUTDOWN: Final = "ServerShutdown"
DRAINED: Final = "NodeDrained"
SENTENCES: Final = {
    IDLE: "it was idle for its idleTimeout",
    LIFETIME: "its maxLifetime is over",
    CAP: "its cost reached maxCostUSD",
    REQUESTED: "it was asked to stop",
    SHUTDOWN: "the server was shut down",
    DRAINED: "its node was drained",
}


def condition(kind: str, state: str, reason: str, message: str) -> dict[str, Any]:
    """One entry of `status.conditions`."""
    return {"type": kind, "status": state, "reason": reason, "message": message, "lastTransitionTime": now()}


def first_status(value: Value) -> Value:
    """The status a new Sandbox has."""
    stopped = {"phase": "Stopped", "stopReason": REQUESTED} if value["spec"]["state"] == "Stopped" else {"phase": "Pending"}
    return {**stopped, "activity": "Idle", "expirationTime": expiry(value)}


def expiry(value: Value) -> str:
    """When maxLifetime deletes it."""
    return stamp(seconds_of(value["metadata"]["creationTimestamp"]) + parse_duration(value["spec"]["lifecycle"]["maxLifetime"]))


def loss_of(value: Value) -> str | None:
    """What a stopped sandbox has lost, if its last stop did not save it: nobody may run on in an older workspace without knowing."""
    found = [one["message"] for one in value["status"].get("conditions", ()) if (one["type"], one["status"]) == ("StateSaved", "False")]
    return str(found[0]) if found else None


__all__ = ["DRAINED", "LOST", "REQUESTED", "SENTENCES", "SHUTDOWN", "condition", "expiry", "first_status", "loss_of"]
