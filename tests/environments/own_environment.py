"""Source text of small environments of a user's own, for tests that load them as files."""

HEAD = """
import asyncio, os, signal, sys, time
from sandmill.environments.task import *
from sandmill.sandboxes import SandboxSpec


class Own:
    name, version, digest = "own", "0.1.0", "d1"
    sandbox = SandboxSpec()
    splits = {
        "train": [Task(id="a", prompt="2+2?", identity="a"), Task(id="b", prompt="3+3?", identity="b")],
        "heldout": [Task(id="c", prompt="4+4?", identity="c")],
    }

    def files(self, task):
        return {}

    async def prepare(self, task, sandbox):
        pass

    async def collect(self, task, sandbox):
        return {}

    async def grade(self, task, submission, artifacts):
        answer = submission.answer
"""


def write_environment(folder, grade, name="own.py", tail="", head=HEAD):
    """A module whose `environment` grades with the given statements (they see `self`, `task`, `answer`); returns its reference."""
    body = "\n".join(f"        {line}" for line in grade.strip().splitlines())
    path = folder / name
    path.write_text(f"{head}{body}\n\n\nenvironment = Own()\n{tail}")
    return f"{path}:environment"
