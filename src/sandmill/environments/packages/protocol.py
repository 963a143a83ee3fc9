"""What a package in its sandbox may answer, checked on our side. In: bytes that other people's code wrote. Out: records, or GraderFailed.

Every text in a record was chosen by the package: data, never a path, a format or something to show as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sandmill.environments.packages.frames import LARGEST_BYTES, packed
from sandmill.environments.verdicts import reason_of
from sandmill.errors import GraderFailed

M = TypeVar("M", bound=msgspec.Struct)


class Message(msgspec.Struct, frozen=True):
    """One message of a prompt or an observation."""

    role: str
    content: str


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded package is. `splits`: tasks by split, null where they never end."""

    name: str
    version: str
    splits: Mapping[str, int | None]
    licence: str = ""
    reward: str = "number"
    """In words, for people: "0 or 1", "from -1 to 1"."""
    passes_at: float = 1.0
    """The reward from which on an episode counts as passed, unless the package says so itself."""
    multi_turn: bool = False
    """Whether the package answers what the model says, until the episode is over."""
    tools: tuple[str, ...] = ()
    """Function definitions, as JSON text. A package with any is multi-turn."""
    grouped: bool = False
    """Whether rewards depend on the other episodes of a group: then these are graded together."""
    uses: tuple[str, ...] = ()
    """What its graders cannot do without: `network`, `judge`, `judge:NAME`, `mcp:NAME`."""
    finishes_again: bool = False
    """Whether an episode that is over can be scored once more, as if it had not been before."""
    sessions: int = 64
    """Episodes that one worker can play at once."""
    modules: tuple[str, ...] = ()
    """Files that loading it imported, by their paths inside."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One task as its package has it. `row` goes back to the package to grade and is never shown to a policy."""

    prompt: str | tuple[Message, ...]
    row: msgspec.Raw
    id: str | None = None
    identity: str | None = None
    answer: str | None = None
    """A completion that should get the full reward, where the package knows one."""
    metadata: Mapping[str, str] = {}


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of a split, from one number on."""

    rows: tuple[Row, ...]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader said. `reward` and `parts` are finite; `passed` None: the reward decides."""

    reward: float
    parts: Mapping[str, float] = {}
    passed: bool | None = None
    answered: bool = True
    """False: the package found no answer to grade."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader said to one episode of a group: a score, or why there is none."""

    score: Score | None = None
    failed: str = ""


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """Of each episode of a group, in its order."""

    members: tuple[Member, ...]


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """An episode at its end, for the process that grades its whole group. Only the package can read it."""

    state: str


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A session has begun: what the policy sees first, and the tools of this task beyond the package's own."""

    prompt: str | tuple[Message, ...]
    tools: tuple[str, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment answered to one action. `reward`: of this step, None where the environment gives none."""

    observation: str
    done: bool = False
    reward: float | None = None
    ok: bool = True
    """False: the action was one that the environment does not know."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no answer. `cause`: deadline, exit, size, load or raised."""

    cause: str
    reason: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an adapter."""

    method: str
    params: Mapping[str, Any]
    seed: int | None = None


def frame(kind: int, session: int, body: bytes, deadline_s: float = 0.0) -> bytes:
    """One frame to the worker; no deadline when it is 0. Raises GraderFailed for a body that is too large."""
    if len(body) > LARGEST_BYTES:
        raise GraderFailed(f"a call of {len(body)} bytes is more than the {LARGEST_BYTES} that a package takes")
    return packed(kind, session, body, max(1, int(deadline_s * 1000)) if deadline_s else 0)


def read(body: bytes, kind: type[M], what: str) -> M:
    """A record from a package's answer. Raises GraderFailed, naming the field."""
    try:
        found = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise GraderFailed(f"{what} is not what it should be: {reason_of(error)}") from error
    scores = [found] if isinstance(found, Score) else [one.score for one in found.members] if isinstance(found, Members) else []
    for score in scores:
        _check_finite(score)
    return found


def _check_finite(score: Score | None) -> None:
    if score is None:
        return
    for name, value in (("reward", score.reward), *((f"part {name!a}", value) for name, value in score.parts.items())):
        if not math.isfinite(value):
            raise GraderFailed(f"the grader's {name} is {value}, not a finite number")
