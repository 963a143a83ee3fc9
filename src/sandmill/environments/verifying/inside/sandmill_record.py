"""A pytest plugin: what every test came to, a line of JSON each, appended to the file or descriptor that SANDMILL_RECORD names.

A session that does not end by itself has no last line, whatever its exit code says. Runs under any Python from 3.6 on.
"""

import json
import os
from typing import Any

_stream: Any = None


def pytest_collection_finish(session: Any) -> None:
    """Which tests there are."""
    _say({"collected": [item.nodeid for item in session.items]})


def pytest_runtest_logreport(report: Any) -> None:
    """What one part of a test came to."""
    _say({"test": report.nodeid, "when": report.when, "outcome": report.outcome, "expected": hasattr(report, "wasxfail")})


def pytest_collectreport(report: Any) -> None:
    """What could not be imported."""
    if report.outcome == "failed":
        _say({"uncollected": report.nodeid})


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """The end."""
    _say({"finished": int(exitstatus)})


def _say(line: Any) -> None:
    if _stream is not None:
        _stream.write(json.dumps(line) + "\n")
        _stream.flush()


def _open() -> None:
    """When this is imported, before any file of the tests is: a session that ends on the way to them began all the same."""
    global _stream
    place = os.environ.pop("SANDMILL_RECORD", "")  # the programs under test need not be told
    if place and "PYTEST_XDIST_WORKER" not in os.environ:  # a worker's results are reported by its controller
        _stream = os.fdopen(int(place), "a", closefd=False) if place.isdigit() else open(place, "a")  # noqa: SIM115 - for the session
        _say({"began": True})


_open()
