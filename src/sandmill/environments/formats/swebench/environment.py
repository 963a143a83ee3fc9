"""`swebench/FILE`: rows of SWE-bench as an environment. In: rows, images, the `swebench` package. Out: tasks, sandboxes, verdicts.

The agent edits /testbed. What it leaves is taken as a patch, applied to a fresh copy of the image, and evaluated there as the benchmark
does; the reward is 1 when the issue is resolved, else 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec

from sandmill.environments.environment import Artifacts
from sandmill.environments.formats.swebench import patches
from sandmill.environments.formats.swebench.harness import Evaluation, Harness
from sandmill.environments.formats.swebench.options import Options
from sandmill.environments.formats.swebench.resolution import confirmed, contradicted, resolve
from sandmill.environments.formats.swebench.rows import Row
from sandmill.environments.handover import Cheat
from sandmill.environments.packages.loaded import Lost
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure, Submission, Task, Verdict
from sandmill.environments.verdicts import reason_of
from sandmill.environments.verifying.cheats import CHEATS, cheat
from sandmill.environments.verifying.verify import Findings, Tests, verify
from sandmill.errors import EnvironmentFailed, GraderFailed
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.backends.native import wire

TESTBED: Final = "/testbed"
START: Final = b">>>>> Start Test Output"
_SETUP_S: Final = 180.0
_LARGEST_LOG_BYTES: Final = 32 << 20
_GIT_S: Final = 120.0
_APPLY: Final = "cd /testbed && git apply --verbose - || patch --batch --fuzz=5 -p1"


class SweBenchEnvironment:
    """See the module. Belongs to the event loop that it first grades on; `close` ends the package's sandbox."""

    version = "1.0.0"
    sandbox = SandboxSpec()

    def __init__(
        self, name: str, rows: Mapping[str, Row], splits: Mapping[str, Sequence[Task]], options: Options, harness: Harness
    ) -> None:
        self.name = f"swebench/{name}"
        self.options = options
        self.tasks = tasks_of(rows)
        self.splits = splits
        self._rows = rows
        self._harness = harness
        self._evaluations: dict[str, Evaluation] = {}
        self._turns: asyncio.Semaphore | None = None

    @cached_property
    def digest(self) -> str:
        """sha256 over every row."""
        return hashlib.sha256("".join(self.task_digest(task) for task in self.tasks).encode()).hexdigest()

    def task_digest(self, task: Task) -> str:
        """sha256 over a row and the options that decide its grading."""
        deciding = msgspec.structs.replace(self.options, verifiers=1)
        return hashlib.sha256(
            f"swebench 2 {self._harness.digest} {deciding}".encode() + msgspec.msgpack.encode(self._rows[task.id])
        ).hexdigest()

    def files(self, task: Task) -> Mapping[str, bytes]:
        """None: they are in the image."""
        return {}

    async def sandbox_for(self, task: Task) -> SandboxSpec:
        """The row's image, with its repository as workdir."""
        row, options = self._rows[task.id], self.options
        return SandboxSpec.of(
            cpu=options.cpu, memory=options.memory, disk=options.disk, workdir=TESTBED, image=row.image or image_name(row, options.image)
        )

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        """Nothing."""

    async def collect(self, task: Task, sandbox: Sandbox) -> Artifacts:
        """Nothing: see `grade_sandbox`."""
        return {}

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        """Cannot be done without the agent's sandbox. Raises GraderFailed."""
        raise GraderFailed("SWE-bench rows are graded by what the agent left in its sandbox")

    def grading_timeout_s(self, task: Task) -> float:
        """One evaluation, and what it takes to get there."""
        return self.options.timeout_s + _SETUP_S

    @contextlib.asynccontextmanager
    async def grading_turn(self) -> AsyncIterator[None]:
        """At most option `verifiers` at once."""
        self._turns = self._turns or asyncio.Semaphore(self.options.verifiers)
        async with self._turns:
            yield

    async def grade_sandbox(self, task: Task, submission: Submission, sandbox: Sandbox | None) -> Verdict:
        """Whether the agent's patch resolves the issue. A patch that does not apply, or a repository that the agent broke, does not."""
        try:
            return await self._verdict(task, sandbox)
        except Lost as error:
            return InfrastructureFailure(boundary=Boundary.GRADER, reason=reason_of(error), retryable=True)

    async def _verdict(self, task: Task, sandbox: Sandbox | None) -> Graded:
        row = self._rows[task.id]
        patch = b"" if sandbox is None else await _patch(sandbox, row.base_commit)
        if patch is None or patches.reaches_git(patch):
            return _unresolved(applied=False)
        evaluation = await self._evaluation(row)
        findings = await self._evaluated(task, row, evaluation, patch)
        if findings.timed_out and self.options.at_timeout == "failure":
            raise GraderFailed(f"the evaluation of {row.instance_id} did not end within {self.options.timeout_s:g} s")
        if findings.timed_out:
            return _unresolved(applied=True)
        if patches.UNAPPLIED in findings.results:
            return _unresolved(applied=False)
        if START not in findings.output:
            raise GraderFailed(f"the evaluation of {row.instance_id} never came to its tests: {_end(findings.output)}")
        status = await self._harness.parse(row, evaluation, findings.output)
        fail_only = evaluation.eval_type == "fail_only"
        if contradicted(findings.output.decode("utf-8", "replace"), status, fail_only=fail_only):
            return _unresolved(applied=True)
        found = resolve(
            confirmed(status, findings.sessions, pytest="pytest" in evaluation.eval_script),
            row.fail_to_pass,
            row.pass_to_pass,
            fail_only=fail_only,
        )
        parts = {"fail_to_pass": found.fail_to_pass, "pass_to_pass": found.pass_to_pass, "applied": 1.0}
        return Graded(reward=float(found.resolved), passed=found.resolved, parts=parts)

    async def _evaluation(self, row: Row) -> Evaluation:
        if row.instance_id not in self._evaluations:
            if row.eval_script:
                made = Evaluation(eval_script=row.eval_script, log_parser=row.log_parser, eval_type=row.eval_type)
            else:
                made = await self._harness.evaluation(row)
            self._evaluations[row.instance_id] = made
        return self._evaluations[row.instance_id]

    async def _evaluated(self, task: Task, row: Row, evaluation: Evaluation, patch: bytes) -> Findings:
        spec = await self.sandbox_for(task)
        limit_s = self.options.timeout_s + _SETUP_S
        spec = msgspec.structs.replace(spec, timeout_s=limit_s, idle_timeout_s=limit_s)
        files = {
            patches.PATCH: (0o644, patch),
            patches.ALLOWED: (0o644, patches.allowed(_bytes(row.patch))),
            patches.EVALUATION: (0o755, _bytes(evaluation.eval_script)),
            "/tests/run.sh": (0o755, patches.script()),
        }
        tests = Tests(
            files=files,
            command=("/bin/bash", "/tests/run.sh"),
            timeout_s=self.options.timeout_s,
            env={"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_RETRIES": "0"},
            results=(patches.UNAPPLIED,),
            largest_output_bytes=_LARGEST_LOG_BYTES,
            stand_ins=False,
        )
        return await verify(spec, spec, (), tests)

    def has_solution(self, task: Task) -> bool:
        """Every row has its reference patch."""
        return True

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """Applies the reference patch. Raises EnvironmentFailed."""
        patch = _bytes(self._rows[task.id].patch)
        await sandbox.write_batch(wire.entry("/tmp/reference.diff", 0o100644, patch), "user")
        done = await sandbox.run.aio("bash", "-c", f"{_APPLY} < /tmp/reference.diff", timeout=_GIT_S, merge_stderr=True)
        if done.exit_code != 0:
            raise EnvironmentFailed(f"the reference patch of {task.id} does not apply: {_end(done.stdout)}")

    def cheats(self, task: Task) -> tuple[Cheat, ...]:
        """The general ones, and results printed by the code under test."""
        row = self._rows[task.id]
        lines = "".join(f"PASSED {test}\n" for test in (*row.fail_to_pass, *row.pass_to_pass))
        body = "import contextlib, os\nfor number in range(1, 64):\n    with contextlib.suppress(OSError):\n"
        body += f"        os.write(number, {lines!r}.encode())\nos._exit(0)\n"
        printed = "".join(f"printf %s {shlex.quote(body)} > {shlex.quote(path)}\n" for path in _sources(row))
        return (*CHEATS, cheat("results printed by the program", printed))

    def outside(self, task: Task) -> tuple[str, ...]:
        """Nothing but a patch is taken over."""
        return ()

    async def close(self) -> None:
        """Ends the package's sandbox. Idempotent."""
        await self._harness.close()


def tasks_of(rows: Mapping[str, Row]) -> tuple[Task, ...]:
    """All rows as tasks, in their order."""
    return tuple(
        Task(id=id, prompt=row.problem_statement, identity=id, metadata={"repo": row.repo, "version": row.version})
        for id, row in rows.items()
    )


def image_name(row: Row, template: str) -> str:
    """The image of a row that names none."""
    if template:
        return template.replace("{instance_id}", row.instance_id)
    return f"swebench/sweb.eval.x86_64.{row.instance_id.replace('__', '_1776_')}:latest"


def _sources(row: Row) -> list[str]:
    """Python files that the reference patch changes."""
    lines = row.patch.split("\n")
    return [
        f"{TESTBED}/{line.removeprefix('+++ b/').strip()}" for line in lines if line.startswith("+++ b/") and line.strip().endswith(".py")
    ]


async def _patch(sandbox: Sandbox, commit: str) -> bytes | None:
    """What the agent changed since `commit`, as bytes; None when its repository cannot say."""
    done = await sandbox.run.aio(
        "bash", "-c", patches.DIFF + shlex.quote(commit), user="user", workdir="/", timeout=_GIT_S, max_output=patches.LARGEST_PATCH_BYTES
    )
    return None if done.timed_out or done.exit_code != 0 or len(done.stdout) >= patches.LARGEST_PATCH_BYTES else done.stdout


def _unresolved(*, applied: bool) -> Graded:
    return Graded(reward=0.0, passed=False, parts={"fail_to_pass": 0.0, "pass_to_pass": 0.0, "applied": float(applied)})


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _end(output: bytes) -> str:
    text = output.decode("utf-8", "replace")[-400:]
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split()) or "it wrote nothing"
