"""Graders in child processes: the same verdicts, killed when they hang, gone when they should be."""

import asyncio
import os
import re
import time
from pathlib import Path

import pytest
from own_environment import write_environment

from sandmill.environments import registry
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure, Submission

GRADE = """
if answer == "hang":
    while True:
        pass
if answer == "hang in C":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(3600)
if answer == "raise":
    raise KeyError("gold")
if answer == "exit":
    sys.exit(0)
if answer == "die":
    os._exit(0)
if answer == "print":
    print("x" * 100_000)
    os.write(1, b"y" * 100_000)
if answer == "number":
    return 1.0
if answer == "child":
    import subprocess
    child = subprocess.Popen(["sleep", "3600"])
    open(os.environ["CHILD_PID_FILE"], "w").write(str(child.pid))
    while True:
        pass
return Graded(reward=1.0, passed=True, parts={"pid": float(os.getpid())})
"""


def graded(reference, answers, timeout_s=5.0):
    """Grades the answers one after the other; the verdicts."""

    async def main():
        environment = registry.get(reference)
        task = environment.splits["train"][0]
        try:
            return [await grade_episode(environment, task, Submission(answer=answer), None, timeout_s=timeout_s) for answer in answers]
        finally:
            await environment.close()
            await environment.close()

    return asyncio.run(main())


@pytest.fixture
def reference(tmp_path):
    return write_environment(tmp_path, GRADE)


def test_one_child_grades_many_episodes_and_it_is_not_this_process(reference):
    verdicts = graded(reference, ["4", "print", "4"])
    pids = {verdict.parts["pid"] for verdict in verdicts}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert not Path(f"/proc/{int(pids.pop())}").exists()


def test_a_child_that_hangs_is_killed_and_the_next_episode_graded(reference):
    start = time.monotonic()
    verdicts = graded(reference, ["4", "hang", "4", "hang in C", "4"], timeout_s=1.0)
    assert time.monotonic() - start < 60
    kinds = [type(verdict) for verdict in verdicts]
    assert kinds == [Graded, InfrastructureFailure, Graded, InfrastructureFailure, Graded]
    assert verdicts[1].boundary is Boundary.GRADER
    assert verdicts[1].reason == "TimeoutError: the grader took longer than 1 s"
    assert len({verdict.parts["pid"] for verdict in verdicts[::2]}) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("raise", "KeyError: 'gold'"),
        ("exit", r"exit\(0\)"),
        ("die", r"the grading process ended \(exit code 0\) before it gave a verdict"),
        ("number", "the grader returned 1.0"),
    ],
)
def test_what_a_grader_does_wrong_comes_back_as_a_reason(reference, answer, reason):
    (verdict, after) = graded(reference, [answer, "4"])
    assert isinstance(verdict, InfrastructureFailure)
    assert re.search(reason, verdict.reason)
    assert isinstance(after, Graded)


def test_what_a_killed_grader_had_started_dies_too(reference, tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("CHILD_PID_FILE", str(pid_file))
    graded(reference, ["child"], timeout_s=1.5)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_graders_take_turns_and_waiting_does_not_count(tmp_path):
    reference = write_environment(tmp_path, "time.sleep(0.4)\nreturn Graded(reward=1.0, passed=True)")

    async def main():
        environment = registry.get(reference)
        task = environment.splits["train"][0]
        try:
            calls = [grade_episode(environment, task, Submission(answer="4"), None, timeout_s=2.0) for _ in range(12)]
            return await asyncio.gather(*calls)
        finally:
            await environment.close()

    assert asyncio.run(main()) == [Graded(reward=1.0, passed=True)] * 12


def test_an_environment_that_differs_in_the_child_is_refused(tmp_path):
    reference = write_environment(tmp_path, "return Graded(reward=1.0, passed=True)", tail="Own.digest = str(os.getpid())\n")
    (verdict,) = graded(reference, ["4"])
    assert isinstance(verdict, InfrastructureFailure)
    assert "its digest differs" in verdict.reason


def test_an_environment_that_only_loads_here_is_a_failure_with_its_reason(tmp_path):
    tail = f"if os.getpid() != {os.getpid()}:\n    raise RuntimeError('not here')\n"
    (verdict,) = graded(write_environment(tmp_path, "return 1", tail=tail), ["4"])
    assert isinstance(verdict, InfrastructureFailure)
    assert "could not load" in verdict.reason
    assert "not here" in verdict.reason
