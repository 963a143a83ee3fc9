"""The sandboxes of a server, listed and stopped from outside. In: its URL, a name or id. Out: the records that this machine's own have.

All on the sandbox loop. A server out of reach is a SandboxError, as it is for whoever creates one there.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, Final

from sandmill.config.quantities import parse_bytes, parse_cpu
from sandmill.errors import SandboxError
from sandmill.sandboxes.backends.remote.client import AnswerError, Client, client_of, object_of
from sandmill.sandboxes.backends.remote.preserving import NAME
from sandmill.sandboxes.registry import SandboxRecord

_PAGE: Final = "500"
_OVER: Final = ("Stopping", "Stopped", "Failed", "Deleting")


async def records(url: str) -> list[SandboxRecord]:
    """The live sandboxes of the environment's project, oldest first. Raises ConfigError, SandboxError."""
    client, found, after = client_of(url), list[SandboxRecord](), ""
    while True:
        page = await _asked(client, "GET", "sandboxes", {"limit": _PAGE} | ({"continue": after} if after else {}))
        found += [_record(value) for value in page["items"] if value["status"]["phase"] not in _OVER]
        after = page.get("metadata", {}).get("continue", "")
        if not after:
            return sorted(found, key=lambda record: -record.age_s)


async def stop(url: str, wanted: str) -> list[SandboxRecord]:
    """Ends every sandbox of that name or id, and returns them. Raises ConfigError, SandboxError."""
    chosen = [record for record in await records(url) if wanted in (record.id, record.name)]
    for record in chosen:
        await _asked(client_of(url), "DELETE", f"sandboxes/{record.id}", {})
    return chosen


async def _asked(client: Client, method: str, path: str, query: dict[str, str]) -> dict[str, Any]:
    try:
        return object_of(await client.ask(method, path, query=query))
    except AnswerError as error:
        raise error.of_creation() from error
    except ConnectionError as error:
        raise SandboxError(f"{error}; start it (`sandmill serve`), or unset SANDMILL_API_URL to use this machine") from error


def _record(value: dict[str, Any]) -> SandboxRecord:
    meta, spec = value["metadata"], value["spec"]
    return SandboxRecord(
        id=meta["name"],
        name=meta.get("annotations", {}).get(NAME) or meta["name"],
        labels=meta.get("labels", {}),
        owner_pid=0,
        age_s=max(0.0, time.time() - datetime.fromisoformat(meta["creationTimestamp"]).timestamp()),
        cpu=parse_cpu(spec["resources"]["cpu"]),
        memory_bytes=parse_bytes(spec["resources"]["memory"]),
        disk_bytes=parse_bytes(spec["resources"]["disk"]),
        workdir=spec.get("workingDir", ""),
    )
