"""Agent reinforcement learning on your own machines: isolated sandboxes, cheat-proof grading, GRPO.

The sandbox SDK, all of it importable from here and nothing of it loaded before it is used:

    from sandmill import Sandbox

    with Sandbox.create(cpu=1, memory="2Gi", idle_timeout="5m", max_cost=1) as sandbox:
        with sandbox.open("hello.txt", "w") as file:
            file.write("hello\\n")
        process = sandbox.exec("bash", "-c", "wc -c hello.txt")
        print(process.stdout.read(), process.wait())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandmill.sandboxes import PIPE, Completed, Egress, Pool, Process, Sandbox, SandboxSpec, list_sandboxes, stop_sandbox

__all__ = ["PIPE", "Completed", "Egress", "Pool", "Process", "Sandbox", "SandboxSpec", "list_sandboxes", "stop_sandbox"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'sandmill' has no attribute {name!r}")
    return getattr(importlib.import_module("sandmill.sandboxes"), name)


def __dir__() -> list[str]:
    return [*__all__, "errors"]
