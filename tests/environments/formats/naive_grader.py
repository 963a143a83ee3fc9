"""A grader as one would write it in an afternoon: it runs the verifier where the agent worked, with all that was left there.

Reference solutions pass it and untouched tasks fail it, so it looks right. Every cheat must be seen to work against it, or the tests that
reject cheats could not fail.
"""

from __future__ import annotations

import json

from sandmill.environments.verifying.toolbox import toolbox
from sandmill.errors import SandboxFileError
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.images import store

PYTEST_VERIFIER = b"""#!/bin/bash
source $HOME/.local/bin/env 2>/dev/null
mkdir -p /logs/verifier
cd /app
PYTHONPATH=/.sandmill/site python3 -m pytest -q -p no:cacheprovider ${1:-/tests/test_outputs.py}
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
UVX_VERIFIER = b"""#!/bin/bash
source $HOME/.local/bin/env 2>/dev/null
mkdir -p /logs/verifier
if uvx pytest /tests/test_outputs.py || PYTHONPATH=/.sandmill/site python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py
then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
DIFF_VERIFIER = b"""#!/bin/bash
mkdir -p /logs/verifier
if diff -q /tests/expected_answer.txt /app/answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
GREP_VERIFIER = b"""#!/bin/sh
mkdir -p /logs/verifier
if grep -q hello /app/greeting.txt; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


async def naive_reward(
    spec: SandboxSpec, script: str, verifier: bytes, tests: dict[str, bytes], *, staged_first: bool = False
) -> float | None:
    """The reward of a sandbox in which `script` ran; None where the verifier left none."""
    files = {"/tests/test.sh": verifier, **{f"/tests/{name}": data for name, data in tests.items()}}
    async with await Sandbox.from_spec.aio(spec, server="") as untouched:
        sandbox, _ = await untouched.fork_parts.aio(spec, (), top=toolbox(store()))
    async with sandbox:
        if staged_first:
            await sandbox.write_files.aio(files, user="root")
        await sandbox.run.aio("sh", "-c", script, timeout=30)
        if not staged_first:
            await sandbox.run.aio("rm", "-rf", "/tests", user="root", timeout=30)
            await sandbox.write_files.aio(files, user="root")
        await sandbox.run.aio("sh" if verifier is GREP_VERIFIER else "bash", "/tests/test.sh", user="root", timeout=30)
        return await _reward(sandbox)


async def _reward(sandbox: Sandbox) -> float | None:
    for name, read in (("reward.json", lambda data: float(json.loads(data)["reward"])), ("reward.txt", float)):
        try:
            return read(await sandbox.read.aio(f"/logs/verifier/{name}", user="root"))
        except (SandboxFileError, ValueError, KeyError):
            continue
    return None
