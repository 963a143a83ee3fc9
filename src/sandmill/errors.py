"""Every error Sandmill raises, in one tree, named by the boundary that broke.

    SandmillError
    ├── ConfigError (ValueError)             a manifest, option or file a person wrote is wrong
    ├── SandboxError
    │   ├── IsolationUnavailable (RuntimeError)   this machine cannot isolate; nothing was started
    │   ├── SandboxCreateFailed (OSError)         isolation is possible, this creation failed
    │   ├── SandboxGone (ConnectionError)         the sandbox died or was terminated; carries the reason
    │   ├── ExecFailed (OSError)                  the command could not be started (nothing ran)
    │   ├── ExecTimeout (TimeoutError)            raised only by callers that ask for it
    │   ├── SandboxFileError (OSError)            a path inside the sandbox could not be used
    │   ├── Unsupported (NotImplementedError)     the sandbox's backend cannot do this at all; names backend and feature
    │   └── ImageError (ValueError)               an image or archive cannot be used, or no longer exists
    ├── EnvironmentFailed
    │   ├── UnknownEnvironment (LookupError)
    │   └── GraderFailed (RuntimeError)           the grader raised, hung or answered nonsense
    ├── ModelError
    │   ├── ModelNotFound (FileNotFoundError)
    │   ├── EngineDied (RuntimeError)             the decode thread ended; pending samples fail with this
    │   └── ContextFull (ValueError)
    ├── TrainingError
    │   ├── NonFinite (ArithmeticError)           a NaN or infinity, with its place named
    │   └── NothingToLearn (RuntimeError)         too many steps in a row without a usable group
    ├── RunError
    │   ├── RunBusy (BlockingIOError)             another process writes this run folder
    │   ├── RunIncompatible (ValueError)          written by another version or for another manifest
    │   ├── CheckpointCorrupt (ValueError)
    │   └── DiskFull (OSError)
    └── ServerError
        ├── StateBusy (BlockingIOError)           another server uses this state folder or database
        ├── StateIncompatible (ValueError)        the server's state was written by another version
        ├── NodeRefused (PermissionError)         the server no longer has this machine as its node
        └── StoreUnavailable (ConnectionError)    the server's database does not take writes

A message says what happened, to which object, and what to do next, in one sentence.
"""

from __future__ import annotations

from pathlib import Path


class SandmillError(Exception):
    """Root of the tree. `str(error)` is one sentence fit to show a person."""


class ConfigError(SandmillError, ValueError):
    """Something a person wrote is wrong; `where` is `file:line: field` as far as known."""

    def __init__(self, message: str, *, file: Path | str | None = None, line: int | None = None, field: str | None = None) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.line = line
        self.field = field
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        super().__init__(": ".join(part for part in (place, field or "", message) if part))


class SandboxError(SandmillError):
    """Something between us and a sandbox broke; never the command's own exit status."""


class IsolationUnavailable(SandboxError, RuntimeError):
    """This machine cannot isolate a process; nothing was started, and nothing runs unisolated instead."""


class SandboxCreateFailed(SandboxError, OSError):
    """Creating this sandbox failed; whatever had been made for it was removed."""


class SandboxGone(SandboxError, ConnectionError):
    """The sandbox no longer exists. `reason` says why (terminated, idle timeout, out of memory, node lost...)."""

    def __init__(self, sandbox: str, reason: str) -> None:
        self.sandbox = sandbox
        self.reason = reason
        super().__init__(f"sandbox {sandbox} is gone: {reason}")


class ExecFailed(SandboxError, OSError):
    """The command could not be started, so nothing ran. `errno` is that of execve or chdir inside the sandbox."""


class ExecTimeout(SandboxError, TimeoutError):
    """A command passed its deadline and its whole process tree was killed."""


class SandboxFileError(SandboxError, OSError):
    """A path inside the sandbox could not be opened, listed or removed."""


class Unsupported(SandboxError, NotImplementedError):
    """What was asked for is beyond the sandbox's backend; nothing was changed."""

    def __init__(self, backend: str, feature: str, instead: str = "") -> None:
        self.backend = backend
        self.feature = feature
        super().__init__(f"backend {backend} cannot {feature}" + (f"; {instead}" if instead else ""))


class ImageError(SandboxError, ValueError):
    """An image, an archive of one, or the store of images cannot be used; nothing half-made of it was kept."""


class EnvironmentFailed(SandmillError):
    """A task set could not do its part."""


class UnknownEnvironment(EnvironmentFailed, LookupError):
    """No environment of this name and version; the message names the nearest one."""


class GraderFailed(EnvironmentFailed, RuntimeError):
    """The grader raised, ran out of time, or returned something that is no verdict."""


class ModelError(SandmillError):
    """A model could not be loaded or asked."""


class ModelNotFound(ModelError, FileNotFoundError):
    """No such model folder, bundled model or hub id."""


class EngineDied(ModelError, RuntimeError):
    """The inference engine ended; every pending sample fails with this."""


class ContextFull(ModelError, ValueError):
    """The tokens of an episode no longer fit the model's context."""


class TrainingError(SandmillError):
    """A training step could not be completed; the weights are those before it."""


class NonFinite(TrainingError, ArithmeticError):
    """A NaN or infinity appeared; `place` names the tensor and, where known, the episode."""

    def __init__(self, place: str) -> None:
        self.place = place
        super().__init__(f"non-finite number in {place}; the step was not applied")


class NothingToLearn(TrainingError, RuntimeError):
    """Too many consecutive steps had no group with differing rewards, or no graded episode at all."""


class RunError(SandmillError):
    """A run folder cannot be used as asked."""


class RunBusy(RunError, BlockingIOError):
    """Another live process holds this run folder."""


class RunIncompatible(RunError, ValueError):
    """The run folder was written by another format version or from another manifest."""


class CheckpointCorrupt(RunError, ValueError):
    """A checkpoint is truncated or does not match its recorded digest."""


class DiskFull(RunError, OSError):
    """Writing to the run folder failed for lack of space; what was written before is intact."""


class ServerError(SandmillError):
    """The server could not start, or cannot keep its state."""


class StateBusy(ServerError, BlockingIOError):
    """Another live server holds this state folder or database."""


class StateIncompatible(ServerError, ValueError):
    """The state folder or database was written by another version of the program."""


class NodeRefused(ServerError, PermissionError):
    """The server that this node had joined has removed it, or given its name to another process."""


class StoreUnavailable(ServerError, ConnectionError):
    """The server's database cannot be reached or does not take writes."""


def plainly(error: Exception) -> str:
    """An error's own words, without the number and the path that an OSError puts around them: the sentence has named the path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
