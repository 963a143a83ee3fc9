"""Where actions run: isolated sandboxes on this machine. In: a spec. Out: `Sandbox`, `Process`, `Completed`."""

from __future__ import annotations

from sandmill.sandboxes.backends.usable import usable_backends
from sandmill.sandboxes.dual import block_on, loop
from sandmill.sandboxes.egress import Blocked
from sandmill.sandboxes.files import FileEntry
from sandmill.sandboxes.images import Image, Stored
from sandmill.sandboxes.pool import Pool
from sandmill.sandboxes.probing import Finding, Probe, probe
from sandmill.sandboxes.process import PIPE, Completed, Process, Usage
from sandmill.sandboxes.registry import SandboxRecord, list_sandboxes, stop_sandbox
from sandmill.sandboxes.sandbox import Sandbox
from sandmill.sandboxes.spec import Continuity, Egress, SandboxSpec

__all__ = [
    "PIPE",
    "Blocked",
    "Completed",
    "Continuity",
    "Egress",
    "FileEntry",
    "Finding",
    "Image",
    "Pool",
    "Probe",
    "Process",
    "Sandbox",
    "SandboxRecord",
    "SandboxSpec",
    "Stored",
    "Usage",
    "block_on",
    "list_sandboxes",
    "loop",
    "probe",
    "stop_sandbox",
    "usable_backends",
]
