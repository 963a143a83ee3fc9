"""The `swebench` package, asked in its sandbox: it is other people's code, and the logs that it reads were written by an agent's code.

In: a release, rows, logs. Out: evaluations and what tests came to, checked. It is installed, kept and removed as every package is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from sandmill.environments.formats.plan import adapter
from sandmill.environments.formats.swebench.rows import Row
from sandmill.environments.packages.install import Installed, Report
from sandmill.environments.packages.loaded import Launch
from sandmill.environments.packages.opening import open_package
from sandmill.environments.packages.package import Package, pinned
from sandmill.environments.packages.protocol import read
from sandmill.environments.packages.service import PackageService
from sandmill.environments.packages.wheels import PYTHON
from sandmill.errors import GraderFailed

DESCRIBING: Final = "4.1.0"
"""The last release that makes the evaluations of rows that carry none."""
READING: Final = "5.0.2"
"""One that reads the logs of rows that carry their evaluation."""
_BESIDE: Final = "unidiff==1.0.1"
_CALL_S: Final = 120.0
_MEMORY: Final = "1Gi"
K = TypeVar("K", bound=msgspec.Struct)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """How a row's tests are run and read. An empty `log_parser` is that of the row's repository."""

    eval_script: str
    log_parser: str
    eval_type: str


class _Parsed(msgspec.Struct, frozen=True):
    status: Mapping[str, str]


class Harness:
    """One release of the package in a sandbox, each call in a process of its own. `open` makes it, `close` ends it."""

    def __init__(self, installed: Installed, service: PackageService) -> None:
        self._installed = installed
        self._service = service

    @classmethod
    async def open(cls, release: str, reference: str, report: Report) -> Harness:
        """Installed unless it was. Raises ConfigError for what is no release, EnvironmentFailed, SandboxError."""
        package = Package(bare=pinned([f"swebench=={release}", _BESIDE], "spec.environment.name"))
        return cls(*await open_package(package, _launch, f"swebench {release}", reference, report))

    @property
    def digest(self) -> str:
        """sha256 of what is installed."""
        return self._installed.record.digest

    async def evaluation(self, row: Row) -> Evaluation:
        """The evaluation of a row of a 4.x release. Raises GraderFailed, TimeoutError, SandboxError."""
        whole = msgspec.structs.asdict(row)
        whole["FAIL_TO_PASS"], whole["PASS_TO_PASS"] = whole.pop("fail_to_pass"), whole.pop("pass_to_pass")
        return await self._ask("evaluation", {"row": whole}, Evaluation, row.instance_id)

    async def parse(self, row: Row, evaluation: Evaluation, log: bytes) -> Mapping[str, str]:
        """What every test in a log came to, by its name there. Raises GraderFailed, TimeoutError, SandboxError."""
        part = {"instance_id": row.instance_id, "repo": row.repo, "version": row.version}
        params = {"row": part, "log_parser": evaluation.log_parser, "log": log}
        return (await self._ask("parse", params, _Parsed, row.instance_id)).status

    async def _ask(self, method: str, params: Mapping[str, Any], kind: type[K], instance: str) -> K:
        worker = await self._service.worker()
        try:
            return read(await worker.once(method, params, timeout_s=_CALL_S), kind, "its answer")
        except GraderFailed as error:
            raise type(error)(f"the swebench package failed on {instance}: {error}") from error

    async def close(self) -> None:
        """Ends the package's sandbox. Idempotent."""
        await self._service.close()
        self._installed.use.release()


def _launch(installed: Installed) -> Launch:
    return Launch(adapter=adapter("swebench"), image=installed.record.image, python=PYTHON, memory=_MEMORY)
