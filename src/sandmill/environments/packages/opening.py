"""A package in; installed and loaded in its sandbox, ready to be asked, out. What loading imports is compiled once for all who follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sandmill.environments.packages.install import Installed, Report, add_bytecode, install, remember
from sandmill.environments.packages.loaded import Launch
from sandmill.environments.packages.package import Package
from sandmill.environments.packages.service import PackageService
from sandmill.errors import EnvironmentFailed, GraderFailed

SLOW_LOAD_S: Final = 1.0
"""A package that takes longer to load has its modules compiled."""


async def open_package(
    package: Package, launch: Callable[[Installed], Launch], name: str, reference: str, report: Report
) -> tuple[Installed, PackageService]:
    """The caller closes the service and releases the installed package's use. Raises EnvironmentFailed, ConfigError, SandboxError."""
    installed = await install(package, report)
    service = PackageService(launch(installed))
    try:
        report(f"loading {name}")
        started = time.monotonic()
        worker = await service.worker()
        if not installed.record.compiled and time.monotonic() - started >= SLOW_LOAD_S:
            report(f"compiling {len(worker.description.modules)} modules of {name}")
            await service.close()
            installed = await add_bytecode(installed, worker.description.modules)
            service = PackageService(launch(installed))
        await remember(installed, reference)
    except BaseException as error:
        await service.close()
        installed.use.release()
        if isinstance(error, GraderFailed | TimeoutError):
            raise not_loaded(name, error) from error
        raise
    return installed, service


def not_loaded(name: str, error: Exception) -> EnvironmentFailed:
    """What a package's failure before any episode is called."""
    hint = "; its graders ask a model: give them one by spec.grading.judge" if "OPENAI_API_KEY" in str(error) else ""
    return EnvironmentFailed(f"environment {name} could not be loaded: {error}{hint}")


__all__ = ["not_loaded", "open_package"]
