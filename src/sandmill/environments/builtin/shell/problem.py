"""One generated problem, answers included. It never leaves the runner's process: the policy sees only the `Task` made from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec


class HiddenRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the agent's script on an input it has never seen, and what must come out (whitespace at the ends ignored)."""

    input: str
    expected: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are the starting files; `solution` solves the task, one command line each, the last one printing the answer."""

    family: str
    prompt: str
    files: Mapping[str, str]
    solution: tuple[str, ...]
    answer: str | None
    """The final answer asked for; None where only resulting files count."""
    subject: str = ""
    """The file the question names, if any."""
    key: str = ""
    """A word of the question, or one that a command could look for."""
    result_file: str = ""
    """The file whose content is graded, if any."""
    expected_result: str | None = None
    """What `result_file` must hold (whitespace at the ends ignored)."""
    hidden_runs: tuple[HiddenRun, ...] = ()
    """Runs of `result_file` as a script, in a fresh sandbox."""

    @property
    def identity(self) -> str:
        """What splits may not share: the folder and what is asked of it, however it is phrased."""
        digest = hashlib.sha256()
        for part in (
            self.family,
            self.subject,
            self.key,
            self.result_file,
            *(text for item in sorted(self.files.items()) for text in item),
        ):
            digest.update(f"{len(part)}:{part}".encode())
        return digest.hexdigest()[:24]
