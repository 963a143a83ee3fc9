"""The `swebench` package, asked in a sandbox: it is other people's code, and what it reads was written by an agent's code.

In: a folder with the package in it, rows, logs. Out: evaluations and what tests came to, checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from sandmill.environments.formats.swebench.rows import Row
from sandmill.errors import ConfigError, GraderFailed
from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.dual import in_thread

_SPEC: Final = SandboxSpec(cpu=1.0, memory_bytes=1 << 30, disk_bytes=128 << 20, timeout_s=600.0, workdir="/worker")
_CALL_S: Final = 120.0
_LARGEST_ANSWER_BYTES: Final = 32 << 20
_LARGEST_FOLDER_BYTES: Final = 64 << 20
K = TypeVar("K")
_NEEDED: Final = ("swebench", "unidiff")
_PROGRAM: Final = Path(__file__).with_name("worker_program.py")


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """How a row's tests are run and read. An empty `log_parser` is that of the row's repository."""

    eval_script: str
    log_parser: str
    eval_type: str


class _Parsed(msgspec.Struct, frozen=True):
    status: Mapping[str, str]


class Worker:
    """One copy of the package, as `pip install --target DIR --no-deps swebench unidiff` puts it there. Every call has its own sandbox."""

    def __init__(self, folder: Path) -> None:
        for name in _NEEDED:
            if not (folder / name).is_dir():
                raise ConfigError(
                    f"there is no {name} in {str(folder)!r}; make it with pip install --target {folder.name} --no-deps swebench unidiff",
                    field="options.package",
                )
        self._folder = folder

    @cached_property
    def _files(self) -> Mapping[str, bytes]:
        """The parts that are used: plain files only, since a link could lead to a file of this machine."""
        found: dict[str, bytes] = {"program.py": _PROGRAM.read_bytes()}
        for name in _NEEDED:
            for path in sorted((self._folder / name).rglob("*.py")):
                if path.is_file() and not path.is_symlink():
                    found[f"lib/{path.relative_to(self._folder)}"] = path.read_bytes()
        if sum(len(data) for data in found.values()) > _LARGEST_FOLDER_BYTES:
            raise GraderFailed(f"the package in {self._folder} has more than {_LARGEST_FOLDER_BYTES} bytes of Python")
        return found

    async def describe(self, row: Row) -> Evaluation:
        """The evaluation of a row of a 4.x release. Raises GraderFailed, SandboxError."""
        return await self._ask({"call": "describe", "row": _plain(row)}, {}, Evaluation)

    async def parse(self, row: Row, evaluation: Evaluation, log: bytes) -> Mapping[str, str]:
        """What every test in a log came to, by its name there. Raises GraderFailed, SandboxError."""
        request = {"call": "parse", "row": _plain(row), "log_parser": evaluation.log_parser, "log": "/worker/log"}
        return (await self._ask(request, {"log": log}, _Parsed)).status

    async def _ask(self, request: Mapping[str, Any], files: Mapping[str, bytes], kind: type[K]) -> K:
        own = await in_thread(lambda: self._files)
        async with await Sandbox.from_spec.aio(
            _SPEC, files={**own, **files, "request": json.dumps(request).encode()}, server=""
        ) as sandbox:
            done = await sandbox.run.aio(
                "/bin/sh", "-c", "exec python3 -I program.py /worker/lib < request", timeout=_CALL_S, max_output=_LARGEST_ANSWER_BYTES
            )
        if done.timed_out or done.exit_code != 0:
            ended = f"did not answer within {_CALL_S:g} s" if done.timed_out else done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise GraderFailed(f"the swebench package failed on {request['row']['instance_id']}: {ended or 'it said nothing'}")
        try:
            return msgspec.json.decode(done.stdout, type=kind)
        except msgspec.MsgspecError as error:
            raise GraderFailed(f"the swebench package answered with something else than was asked: {error}") from error


def _plain(row: Row) -> dict[str, Any]:
    """A row with the names that the package knows."""
    values = msgspec.structs.asdict(row)
    values["FAIL_TO_PASS"], values["PASS_TO_PASS"] = list(values.pop("fail_to_pass")), list(values.pop("pass_to_pass"))
    return values
