"""The rules by which tests resolve an issue: missing is failed, cut names are found, a log alone is not believed."""

import pytest

from sandmill.environments.formats.swebench.resolution import confirmed, contradicted, resolve, status_of
from sandmill.environments.verifying.sessions import Outcome, Session


def session(outcomes, *, collected=None, exit_status=0):
    return Session(
        collected=tuple(outcomes if collected is None else collected), outcomes=outcomes, uncollected=(), exit_status=exit_status
    )


@pytest.mark.parametrize(
    ("status", "resolved"),
    [
        ({"f": "PASSED", "p": "PASSED"}, True),
        ({"f": "XFAIL", "p": "SKIPPED"}, True),
        ({"f": "SKIPPED", "p": "PASSED"}, False),
        ({"f": "PASSED"}, False),
        ({"p": "PASSED"}, False),
        ({"f": "PASSED", "p": "FAILED"}, False),
        ({"f": "ERROR", "p": "PASSED"}, False),
        ({}, False),
    ],
)
def test_both_lists_must_hold(status, resolved):
    assert resolve(status, ["f"], ["p"]).resolved is resolved


def test_no_test_that_has_to_pass_is_no_resolution():
    assert not resolve({"p": "PASSED"}, [], ["p"]).resolved


def test_shares_are_told():
    found = resolve({"a": "PASSED", "c": "PASSED"}, ["a", "b"], ["c"])
    assert (found.fail_to_pass, found.pass_to_pass) == (0.5, 1.0)


def test_names_that_were_cut_are_found_where_all_they_may_mean_agree():
    assert status_of("t[log(a", {"t[log(a b)]": "PASSED", "t[log(a c)]": "XFAIL"}) == "PASSED"
    assert status_of("t[log(a", {"t[log(a b)]": "PASSED", "t[log(a c)]": "FAILED"}) is None
    assert status_of("t", {"t2": "PASSED"}) is None
    assert status_of("t[a]", {"t[a]b": "PASSED"}) is None


def test_where_only_failures_are_listed_only_a_failure_counts():
    assert resolve({}, ["f"], ["p"], fail_only=True).resolved
    assert not resolve({"f": "FAILED"}, ["f"], ["p"], fail_only=True).resolved


@pytest.mark.parametrize(
    ("log", "status", "fail_only", "valid"),
    [
        (">>>>> End Test Output\n12 passing\n", {}, True, True),
        (">>>>> End Test Output\nExecuted 0 of 0\n", {}, True, False),
        ("12 passing\n", {}, True, False),
        (">>>>> End Test Output\n>>>>> Test Exit Code: 1\n", {"a": "PASSED"}, False, False),
        (">>>>> End Test Output\n>>>>> Test Exit Code: 1\n", {"a": "FAILED"}, False, True),
        (">>>>> End Test Output\n>>>>> Test Exit Code: 0\n", {"a": "PASSED"}, False, True),
    ],
)
def test_a_log_that_describes_no_run_is_seen(log, status, fail_only, valid):
    assert (contradicted(log, status, fail_only=fail_only) is None) is valid


def test_a_log_is_believed_only_as_far_as_the_record_goes():
    printed = {"m.py::a": "PASSED", "m.py::b": "PASSED", "m.py::c": "PASSED", "m.py::d": "FAILED"}
    record = session({"m.py::a": Outcome.PASSED, "m.py::b": Outcome.FAILED, "m.py::d": Outcome.PASSED}, collected=["m.py::a", "m.py::b"])
    assert confirmed(printed, [record]) == {"m.py::a": "PASSED", "m.py::b": "FAILED", "m.py::c": "MISSING", "m.py::d": "FAILED"}


def test_a_session_that_ended_before_its_tests_confirms_nothing():
    assert confirmed({"m.py::a": "PASSED"}, [session({}, exit_status=None)]) == {"m.py::a": "MISSING"}
    assert confirmed({"m.py::a": "PASSED"}, [session({}, collected=["m.py::a"], exit_status=None)]) == {"m.py::a": "ERROR"}
    assert confirmed({"m.py::a": "PASSED"}, [], pytest=True) == {"m.py::a": "MISSING"}


def test_without_pytest_the_log_stands_alone():
    assert confirmed({"test_a (x.Y)": "PASSED"}, []) == {"test_a (x.Y)": "PASSED"}


def test_names_may_end_at_a_space_or_begin_at_another_folder():
    record = session({"lib/pkg/m.py::a[x y]": Outcome.PASSED, "lib/pkg/m.py::a[x z]": Outcome.PASSED, "lib/pkg/m.py::b": Outcome.PASSED})
    assert confirmed({"lib/pkg/m.py::a[x": "PASSED", "pkg/m.py::b": "PASSED"}, [record]) == {
        "lib/pkg/m.py::a[x": "PASSED",
        "pkg/m.py::b": "PASSED",
    }
