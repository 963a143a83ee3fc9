"""Attempts at tasks that are folders or rows: real sandboxes, on the sandbox loop."""

from __future__ import annotations

import asyncio

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.grading import grade_episode
from sandmill.environments.handover import GoesOn, sandbox_for
from sandmill.environments.task import Submission
from sandmill.sandboxes import Sandbox, loop


def on_loop(work, timeout_s=120):
    """What `work` comes to, awaited on the sandbox loop."""
    return asyncio.run_coroutine_threadsafe(work, loop()).result(timeout_s)


def harbor(place, leave_out=(), **options):
    """The environment of task folders, on this machine's own programs."""
    reference = f"harbor/{place}"
    return registry.get(reference, EnvironmentSection(name=reference, leave_out=tuple(leave_out), options={"base": "host", **options}))


async def attempted(environment, task, *scripts, solve=False):
    """The verdict on a sandbox in which the scripts ran, one per step."""
    spec = await sandbox_for(environment, task)
    async with await Sandbox.from_spec.aio(spec, server="") as sandbox:
        await environment.prepare(task, sandbox)
        submission = Submission(answer="done")
        for script in scripts or ("",):
            if solve:
                await environment.solve(task, sandbox)
            await sandbox.run.aio("bash", "-c", script, timeout=30)
            if not isinstance(environment, GoesOn) or await environment.next_message(task, submission, sandbox) is None:
                break
        return await grade_episode(environment, task, submission, sandbox)
