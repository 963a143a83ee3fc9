"""A pytest plugin: what every test came to, a line of JSON each, appended to the file or descriptor that SANDMILL_RECORD names.

A session that does not end by itself has no last line, whatever its exit code says.
"""

import json
import os

_stream = None


def pytest_configure(config):
    global _stream
    place = os.environ.get("SANDMILL_RECORD", "")
    if _stream is None and place and not hasattr(config, "workerinput"):
        _stream = os.fdopen(int(place), "a", closefd=False) if place.isdigit() else open(place, "a")
        _say({"began": True})


def pytest_collection_finish(session):
    _say({"collected": [item.nodeid for item in session.items]})


def pytest_runtest_logreport(report):
    _say({"test": report.nodeid, "when": report.when, "outcome": report.outcome, "expected": hasattr(report, "wasxfail")})


def pytest_collectreport(report):
    if report.outcome == "failed":
        _say({"uncollected": report.nodeid})


def pytest_sessionfinish(session, exitstatus):
    _say({"finished": int(exitstatus)})


def _say(line):
    if _stream is not None:
        _stream.write(json.dumps(line) + "\n")
        _stream.flush()
