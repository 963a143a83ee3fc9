"""Where an attempt can break. In: what was raised, and which part it was asked of. Out: an InfrastructureFailure that names the part."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Iterator

from sandmill.environments.task import Boundary, InfrastructureFailure
from sandmill.environments.verdicts import reason_of
from sandmill.errors import GraderFailed, IsolationUnavailable, SandboxError, SandboxGone


class Broken(Exception):
    """Carries an InfrastructureFailure from where it happened to the one place that records it."""

    def __init__(self, failure: InfrastructureFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@contextlib.contextmanager
def boundary(where: Boundary) -> Iterator[None]:
    try:
        yield
    except IsolationUnavailable:
        raise
    except SandboxGone as error:
        raise Broken(InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason=str(error), retryable=True)) from error
    except SandboxError as error:
        raise Broken(InfrastructureFailure(boundary=where, reason=str(error), retryable=True)) from error
    except GraderFailed as error:
        raise Broken(InfrastructureFailure(boundary=Boundary.GRADER, reason=str(error), retryable=False)) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise Broken(InfrastructureFailure(boundary=Boundary.DISK, reason=str(error), retryable=False)) from error


@contextlib.asynccontextmanager
async def environment_boundary(patience_s: float, where: Boundary = Boundary.ENVIRONMENT) -> AsyncIterator[None]:
    """Whatever the environment's own code raises, or that it does not answer, is its failure and never the agent's."""
    try:
        async with asyncio.timeout(patience_s):
            yield
    except (Broken, IsolationUnavailable):
        raise
    except TimeoutError as error:
        raise Broken(
            InfrastructureFailure(boundary=where, reason=f"the environment did not answer within {patience_s:g} s", retryable=True)
        ) from error
    except Exception as error:  # a sandbox that it lost is its own, not the agent's
        retryable = where is Boundary.ENVIRONMENT or not isinstance(error, GraderFailed)
        raise Broken(InfrastructureFailure(boundary=where, reason=reason_of(error), retryable=retryable)) from error
