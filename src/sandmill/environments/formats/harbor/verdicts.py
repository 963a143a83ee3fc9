"""One step of a task verified. In: the agent's sandbox, the step. Out: its rewards by name, and what the verifier did."""

from __future__ import annotations

import fnmatch
import posixpath
from typing import Final

from sandmill.environments.formats.harbor.folder import Folder, Stage
from sandmill.environments.formats.harbor.images import Images
from sandmill.environments.formats.harbor.options import Options
from sandmill.environments.formats.harbor.rewards import LARGEST_BYTES, SCALAR, parse
from sandmill.environments.formats.harbor.sandboxes import grading_spec
from sandmill.environments.verifying.verify import Findings, Tests, root, verify
from sandmill.errors import GraderFailed, SandboxFileError
from sandmill.sandboxes import Sandbox, SandboxSpec

_JSON: Final = "/logs/verifier/reward.json"
_TEXT: Final = "/logs/verifier/reward.txt"
_LARGEST_ARTIFACT_BYTES: Final = 64 << 20
_MOST_ARTIFACTS: Final = 10_000
_SETUP_S: Final = 180.0


async def verified(
    source: Sandbox | SandboxSpec, folder: Folder, stage: Stage, images: Images, options: Options
) -> tuple[dict[str, float], Findings]:
    """Runs the step's verifier. Raises GraderFailed where it gave no rewards, SandboxError."""
    if isinstance(source, Sandbox):
        await _gather(source, stage)
    verifier = stage.verifier
    files = {posixpath.join("/tests", name): (mode | 0o111 * name.endswith(".sh"), data) for name, (mode, data) in stage.tests.items()}
    timeout_s = verifier.timeout_sec + _SETUP_S
    mode, hosts = verifier.network_mode or folder.box.network_mode, verifier.allowed_hosts or folder.box.allowed_hosts
    if verifier.environment_mode == "separate":
        box = verifier.environment or folder.box
        files |= await _artifacts(source, stage) if isinstance(source, Sandbox) else {}
        image = await images.of_verifier(folder)
        take: tuple[str, ...] = ()
        grading = source = grading_spec(box, image, options, mode, hosts, timeout_s)
    else:
        image = await images.of(folder)
        grading = grading_spec(folder.box, image, options, mode, hosts, timeout_s)
        workdir = folder.box.workdir or image.workdir or grading.workdir or "/workspace"
        declared = tuple(artifact.source for artifact in stage.artifacts)
        take = tuple(dict.fromkeys((workdir, "/logs/artifacts", *declared, *options.take)))
    tests = Tests(
        files=files,
        command=(posixpath.join("/tests", folder.script),),
        timeout_s=verifier.timeout_sec,
        env={**folder.box.env, **verifier.env},
        user=await images.user(verifier.user, image),
        results=(_JSON, _TEXT),
        largest_result_bytes=LARGEST_BYTES,
    )
    findings = await verify(source, grading, take, tests, options.tools)
    if findings.timed_out and options.at_timeout == "unsolved":
        return {SCALAR: 0.0}, findings
    if findings.timed_out:
        raise GraderFailed(f"the verifier did not end within {verifier.timeout_sec:g} s")
    return _rewards(findings, folder), findings


def _rewards(findings: Findings, folder: Folder) -> dict[str, float]:
    if not folder.by_sessions:
        return parse(findings.results.get(_JSON), findings.results.get(_TEXT))
    if not findings.sessions:
        raise GraderFailed(f"{folder.script} ended with {findings.exit_code} and ran no test by pytest")
    return {SCALAR: 1.0 if all(session.passed for session in findings.sessions) else 0.0}


async def _gather(sandbox: Sandbox, stage: Stage) -> None:
    """The task's own commands that write down what is to be graded. What they run is the agent's machine: their word is its word."""
    for command in stage.verifier.collect:
        await sandbox.run.aio(
            "/bin/sh",
            "-c",
            command.command,
            user=command.user or root(),
            timeout=command.timeout_sec,
            max_output=64 << 10,
            merge_stderr=True,
        )


async def _artifacts(sandbox: Sandbox, stage: Stage) -> dict[str, tuple[int, bytes]]:
    """Declared files out of the agent's sandbox, as bytes, by where the verifier finds them."""
    found: dict[str, tuple[int, bytes]] = {}
    for artifact in stage.artifacts:
        left = _LARGEST_ARTIFACT_BYTES - sum(len(data) for _, data in found.values())
        target = artifact.destination or artifact.source
        for name, data in (await _tree(sandbox, artifact.source, artifact.exclude, left)).items():
            found[posixpath.normpath(posixpath.join(target, name))] = (0o644, data)
    return found


async def _tree(sandbox: Sandbox, source: str, exclude: tuple[str, ...], most_bytes: int) -> dict[str, bytes]:
    """Plain files at and below `source`, by path below it (empty for itself). Raises GraderFailed when they are too many."""
    found: dict[str, bytes] = {}
    above = await _listed(sandbox, posixpath.dirname(source))
    if above.get(posixpath.basename(source)) == "file":
        return {"": await sandbox.read.aio(source, user=root(), max_bytes=most_bytes)}
    pending = [""] if above.get(posixpath.basename(source)) == "folder" else []
    while pending:
        folder = pending.pop()
        for name, kind in (await _listed(sandbox, posixpath.join(source, folder))).items():
            path = posixpath.join(folder, name)
            if any(fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(name, pattern) for pattern in exclude):
                continue
            if kind == "folder":
                pending.append(path)
            elif kind == "file":
                found[path] = await sandbox.read.aio(posixpath.join(source, path), user=root(), max_bytes=most_bytes)
                most_bytes -= len(found[path])
            if len(found) + len(pending) > _MOST_ARTIFACTS:
                raise GraderFailed(f"{source} holds more than {_MOST_ARTIFACTS} files; declare less as artifact")
    return found


async def _listed(sandbox: Sandbox, folder: str) -> dict[str, str]:
    try:
        return {entry.name: entry.kind for entry in await sandbox.list.aio(folder, user=root())}
    except SandboxFileError:
        return {}
