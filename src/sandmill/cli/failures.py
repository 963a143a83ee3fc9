"""Any exception in; one sentence on stderr and an exit code out.

0    done
1    a file or folder that the machine does not let us use, or something unexpected (run again with --debug to see where)
2    a manifest, option or file a person wrote is wrong
3    the environment or the model could not be found or used
4    sandboxes could not do their part
5    training could not go on
6    a run folder cannot be used as asked
7    the server's state cannot be used
130  interrupted by Ctrl-C
141  whoever read our output went away
143  asked to stop by SIGTERM
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from sandmill.errors import (
    ConfigError,
    EnvironmentFailed,
    ModelError,
    RunError,
    SandboxError,
    SandmillError,
    ServerError,
    TrainingError,
)
from sandmill.reports.inert import inert

UNEXPECTED = 1
INTERRUPTED = 130
READER_GONE = 141

_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNUSABLE = _FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG}

_CODES: tuple[tuple[type[SandmillError], int], ...] = (
    (ConfigError, 2),
    (EnvironmentFailed, 3),
    (ModelError, 3),
    (SandboxError, 4),
    (TrainingError, 5),
    (RunError, 6),
    (ServerError, 7),
)


class StoppedError(Exception):
    """A KeyboardInterrupt on its way through the command-line library, which would swallow one."""


def carried(body: Callable[[], int]) -> int:
    """Runs a command's body; a KeyboardInterrupt leaves it as StoppedError."""
    try:
        return body()
    except KeyboardInterrupt as error:
        raise StoppedError from error


def exit_code_of(error: BaseException) -> int:
    """The documented exit code of an exception."""
    if isinstance(error, KeyboardInterrupt | StoppedError):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    return next((code for kind, code in _CODES if isinstance(error, kind)), UNEXPECTED)


def sentence_of(error: BaseException) -> str:
    """What a person reads; one line, inert."""
    if isinstance(error, KeyboardInterrupt | StoppedError):
        return "stopped at once; what was saved before is intact"
    if isinstance(error, SandmillError):
        return inert(_said(error), limit=2000)
    if isinstance(error, OSError) and error.errno in _UNUSABLE:
        return inert(_unusable(error), limit=500)
    if isinstance(error, MemoryError):
        return "this machine ran out of memory; lower spec.resources.maxInFlight or spec.parameters.microBatchSize"
    said = inert(str(error), limit=300)
    return f"unexpected {type(error).__name__}{': ' + said if said else ''}; run again with --debug to see where"


def _unusable(error: OSError) -> str:
    """What the machine said of which path, and the way out."""
    from sandmill.sandboxes.backends.native.state import state_root

    state = state_root().absolute()
    if error.errno in _FULL:
        return f"no space left on the disk that holds {error.filename or f'this folder or {state}'}; free some and run again"
    path = Path(os.fsdecode(error.filename or "."))
    fix = "set SANDMILL_STATE to a folder that you may write to"
    if not path.absolute().is_relative_to(state):
        fix = "run where you may write, or name another place"
    return f"{path} cannot be used: {os.strerror(error.errno or errno.EIO)}; {fix}"


def _said(error: SandmillError) -> str:
    """The error's sentence without the "[Errno 2]" that an OSError puts before it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error)


def report_failure(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Tells stderr (and, with `as_json`, stdout as an event) and returns the exit code. Never raises."""
    code = exit_code_of(error)
    if code == READER_GONE:
        _silence_stdout()
        return code
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        if debug:
            for line in traceback.format_exception(error):
                sys.stderr.write("\n".join(inert(part) for part in line.rstrip("\n").split("\n")) + "\n")
        sys.stderr.write(_red(f"error: {sentence_of(error)}") + "\n")
        sys.stderr.flush()
    if as_json:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(
                json.dumps({"event": "failed", "exit_code": code, "error": type(error).__name__, "sentence": sentence_of(error)}) + "\n"
            )
            sys.stdout.flush()
    return code


def _silence_stdout() -> None:
    """Points stdout at /dev/null, or the interpreter complains about the closed pipe while it exits."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _red(text: str) -> str:
    coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[31m{text}\x1b[0m" if coloured else text
