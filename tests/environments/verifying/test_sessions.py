"""Records of pytest sessions: what each test came to, and that a session which did not end is never a passed one."""

import json

import pytest

from sandmill.environments.verifying.sessions import Outcome, parse_sessions


def record(*lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def report(name, when="call", outcome="passed", expected=False):
    return {"test": name, "when": when, "outcome": outcome, "expected": expected}


BEGAN, FINISHED = {"began": True}, {"finished": 0}


def one(*lines):
    (session,) = parse_sessions(record(*lines))
    return session


def test_a_session_that_ended_with_every_test_passed_is_passed():
    session = one(BEGAN, {"collected": ["a", "b"]}, report("a", "setup"), report("a"), report("a", "teardown"), report("b"), FINISHED)
    assert session.passed
    assert session.outcomes == {"a": Outcome.PASSED, "b": Outcome.PASSED}


@pytest.mark.parametrize(
    "lines",
    [
        (BEGAN,),
        (BEGAN, {"collected": ["a"]}, report("a")),
        (BEGAN, {"collected": ["a", "b"]}, report("a"), FINISHED),
        (BEGAN, {"collected": []}, FINISHED),
        (BEGAN, {"collected": ["a"]}, report("a", outcome="failed"), FINISHED),
        (BEGAN, {"collected": ["a"]}, report("a"), report("a", "teardown", "failed"), FINISHED),
        (BEGAN, {"collected": ["a"]}, report("a", "setup", "skipped"), FINISHED),
        (BEGAN, {"collected": ["a"]}, {"uncollected": "b.py"}, report("a"), FINISHED),
        (BEGAN, {"collected": ["a"]}, report("a"), {"finished": 1}),
        (BEGAN, {"collected": ["a"]}, report("a"), {"finished": True}),
        (BEGAN, {"collected": ["a"]}, report("a"), FINISHED, FINISHED),
        ({"collected": ["a"]}, {"test": "a", "when": "call", "outcome": ["passed"]}, FINISHED),
    ],
)
def test_anything_less_is_not(lines):
    assert not one(*lines).passed


def test_an_expected_failure_counts_as_passed():
    assert one(BEGAN, {"collected": ["a"]}, report("a", outcome="skipped", expected=True), FINISHED).passed


def test_sessions_of_one_file_are_kept_apart_and_rubbish_between_them_is_nothing():
    data = record(BEGAN, {"collected": ["a"]}, report("a"), FINISHED) + b"rubbish\n[]\n\xff\n" + b"[" * 10_000 + b"\n" + record(BEGAN)
    assert [session.passed for session in parse_sessions(data)] == [True, False]
    assert parse_sessions(b"") == ()
