"""Whatever a grader returned in; a sound verdict out, or GraderFailed. No nonsense ever becomes a number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sandmill.environments.task import AgentLimited, Graded, InfrastructureFailure, NoAnswer, Submission, Verdict
from sandmill.errors import GraderFailed, SandmillError

_LONGEST_REASON = 400


def sound_verdict(returned: object) -> Verdict:
    """`returned`, if it is a verdict with a finite number as reward, finite parts and a boolean `passed`. Raises GraderFailed."""
    if isinstance(returned, InfrastructureFailure):
        return returned
    if not isinstance(returned, Graded | NoAnswer | AgentLimited):
        raise GraderFailed(f"the grader returned {_shown(returned)}, which is no verdict")
    _check_number(returned.reward, "reward")
    if not isinstance(returned.passed, bool):
        raise GraderFailed(f"the grader's passed is {_shown(returned.passed)}, not true or false")
    if not isinstance(returned.parts, Mapping):
        raise GraderFailed(f"the grader's parts are {_shown(returned.parts)}, not names with numbers")
    for name, part in returned.parts.items():
        _check_number(part, f"part {name!a}")
    return returned


def with_limit(verdict: Verdict, submission: Submission) -> Verdict:
    """AgentLimited is decided by the episode's own limit, not by the grader: a limited episode keeps reward, pass and parts."""
    if isinstance(verdict, InfrastructureFailure):
        return verdict
    if submission.limit is None:
        if isinstance(verdict, AgentLimited):
            raise GraderFailed(f"the grader says that the agent hit its limit ({verdict.limit}), but it hit none")
        return verdict
    return AgentLimited(limit=submission.limit, reward=verdict.reward, passed=verdict.passed, parts=verdict.parts)


def reason_of(error: BaseException) -> str:
    """An error as one bounded, printable line: a grader's message may hold what the agent wrote."""
    said = str(error)
    text = said if isinstance(error, SandmillError) and said else f"{type(error).__name__}: {said}" if said else type(error).__name__
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: 2 * _LONGEST_REASON])
    return printable if len(printable) <= _LONGEST_REASON else f"{printable[: _LONGEST_REASON - 3]}..."


def _check_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GraderFailed(f"the grader's {name} is {_shown(value)}, not a finite number")


def _shown(value: object) -> str:
    text = ascii(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
