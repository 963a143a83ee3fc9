"""The `pytest` of a grading sandbox. Tests run as another user, who can write neither the reward nor this program's record; the exit code
is what the session itself said at its end, and 70 when it never got there (os._exit, a crash, a kill).

Command line: as pytest's. Run by root it takes SANDMILL_TEST_UID for the tests; otherwise they run as who it is.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from typing import Any

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECORDS = "/.sandmill-run/records"
UNFINISHED = 70
MOST_BYTES = 32 << 20
LAST_S = 2.0
"""For what is still in the pipe when the tests' process has ended."""
REPORTS = ("--junitxml", "--junit-xml")


def main(argv: list[str]) -> int:
    """Runs one session; its exit code."""
    module = argv[:1] == ["--as-module"]
    argv = argv[1:] if module else argv
    uid = int(os.environ.get("SANDMILL_TEST_UID", "0")) if os.geteuid() == 0 else 0
    scratch = tempfile.mkdtemp(prefix="pytest-")
    try:
        if uid:
            os.chown(scratch, uid, uid)
        argv, copies, ctrf = reports(argv, scratch)
        record, code = run(argv, scratch, uid, module)
        for made, wanted in copies:
            copy(made, wanted)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    lines = keep(record)
    finished = [line["finished"] for line in lines if "finished" in line]
    status: int = code or UNFINISHED
    if len(finished) == 1 and lines and "finished" in lines[-1]:
        status = finished[0]
    elif code == 0 or len(finished) > 1:
        sys.stderr.write("pytest ended before its session did\n")
        status = UNFINISHED
    if ctrf:
        write_ctrf(ctrf, lines)
    return status


def reports(argv: list[str], scratch: str) -> tuple[list[str], list[tuple[str, str]], str | None]:
    """Arguments with reports redirected to where the tests' user can write; what to copy where; where a CTRF report is wanted."""
    left: list[str] = []
    copies: list[tuple[str, str]] = []
    ctrf = None
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--ctrf":
            ctrf = value if equals else next(words, None)
        elif name in REPORTS:
            wanted = value if equals else next(words, "")
            made = os.path.join(scratch, f"report-{len(copies)}")
            copies.append((made, wanted))
            left.append(name + "=" + made)
        else:
            left.append(word)
    return left, copies, ctrf


def run(argv: list[str], scratch: str, uid: int, module: bool) -> tuple[bytes, int]:
    """The record's bytes and the process's exit code."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            start(argv, scratch, uid, module, writer)
        finally:
            os._exit(127)
    os.close(writer)
    parts: list[bytes] = []
    size, last = 0, 0.0
    status: int | None = None
    while status is None or (size < MOST_BYTES and time.time() < last):
        ready = select.select([reader], [], [], 0.05)[0]
        data = os.read(reader, 65536) if ready else b""
        if data:
            size += len(data)
            parts.append(data if size <= MOST_BYTES else b"")
        elif status is not None:
            break
        else:
            done, code = os.waitpid(child, 0 if ready else os.WNOHANG)
            if done:
                status, last = code, time.time() + LAST_S
                end_all(uid)
    os.close(reader)
    return b"".join(parts), os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def start(argv: list[str], scratch: str, uid: int, module: bool, writer: int) -> None:
    """Becomes the tests' process."""
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    variables = dict(os.environ, SANDMILL_RECORD=str(writer), HOME=scratch, PYTHONDONTWRITEBYTECODE="1")
    variables["PATH"] = os.pathsep.join(one for one in variables.get("PATH", "").split(os.pathsep) if not one.startswith(HOME))
    folders = ([os.getcwd()] if module else []) + variables.get("PYTHONPATH", "").split(os.pathsep)
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests_main.py")
    # -E: the variables are for the programs that tests start, and would have Python run a sitecustomize.py from there.
    command = [sys.executable, "-E", "-s", program, os.path.join(HOME, "site"), os.pathsep.join(folders)]
    os.execve(sys.executable, [*command, "-o", f"cache_dir={scratch}/cache", *argv], variables)


def end_all(uid: int) -> None:
    """Kills what the tests left running, so that nothing of it writes on."""
    if not uid:
        return
    child = os.fork()
    if child == 0:
        try:
            os.setgid(uid)
            os.setuid(uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def copy(made: str, wanted: str) -> None:
    """A report, if the tests' user left a plain file there."""
    try:
        descriptor = os.open(made, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as source:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and wanted:
            with open(wanted, "wb") as target:
                target.write(source.read(MOST_BYTES))


def keep(record: bytes) -> list[dict[str, Any]]:
    """The record's lines; also kept where only root reads."""
    lines: list[dict[str, Any]] = []
    for text in record.split(b"\n"):
        try:
            line = json.loads(text.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    try:
        os.makedirs(RECORDS, mode=0o700, exist_ok=True)
        with open(os.path.join(RECORDS, f"{time.time_ns():020d}-{os.getpid()}.jsonl"), "wb") as file:
            file.write(record)
    except OSError:
        pass
    return lines


def write_ctrf(place: str, lines: list[dict[str, Any]]) -> None:
    """A report in the Common Test Report Format, of what the record says."""
    outcomes: dict[str, str] = {}
    for line in lines:
        if "test" not in line:
            continue
        before = outcomes.get(line["test"])
        if line["outcome"] == "failed":
            outcomes[line["test"]] = "failed"
        elif line["outcome"] == "skipped" and before is None:
            outcomes[line["test"]] = "skipped"
        elif line["when"] == "call" and before is None:
            outcomes[line["test"]] = "passed"
    states = list(outcomes.values())
    summary: dict[str, int] = {state: states.count(state) for state in ("passed", "failed", "skipped")}
    summary.update(tests=len(states), pending=0, other=0, start=0, stop=0)
    tests = [{"name": name, "status": state, "duration": 0} for name, state in outcomes.items()]
    folder = os.path.dirname(place)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(place, "w") as file:
        json.dump({"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": tests}}, file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
