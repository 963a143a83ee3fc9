"""A script the agent left behind and hidden runs in; whether it prints the right thing for all of them out.

The script runs in a fresh sandbox without network, as the sandbox's ordinary user, with one input at a time and never an expected
output. What it prints is compared here. Its exit code proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sandmill.environments.builtin.shell.problem import HiddenRun
from sandmill.sandboxes import Egress, Sandbox, SandboxSpec

RUN_TIMEOUT_S = 5.0
LARGEST_OUTPUT_BYTES = 4096
SPEC = SandboxSpec(cpu=1.0, memory_bytes=256 << 20, disk_bytes=16 << 20, timeout_s=60.0, network=Egress.deny())
"""Fixed: neither the run's nor the agent's settings reach a grading sandbox."""


async def passes_hidden_runs(script: bytes, runs: Sequence[HiddenRun]) -> bool:
    """True when every run prints what is expected. Raises SandboxError when a grading sandbox breaks.

    A fresh sandbox per run: what one run leaves behind cannot help the next.
    """
    for run in runs:
        if not await _passes(script, run):
            return False
    return bool(runs)


async def _passes(script: bytes, run: HiddenRun) -> bool:
    sandbox = await Sandbox.from_spec.aio(SPEC, files={"script.sh": script, "input.txt": run.input.encode()})
    try:
        done = await sandbox.run.aio("bash", "script.sh", "input.txt", timeout=RUN_TIMEOUT_S, max_output=LARGEST_OUTPUT_BYTES)
    finally:
        await sandbox.terminate.aio()
    return not done.timed_out and done.stdout.strip() == run.expected.encode()
