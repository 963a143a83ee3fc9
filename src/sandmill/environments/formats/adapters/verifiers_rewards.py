"""The rubric of an environment of verifiers 0.1.x as a grader. In: finished states. Out: a score for each, or why it has none.

verifiers turns what a reward function raises into 0.0 and a line in a log; here it is a failure. One that is asked about a single reply
fails for that reply alone; one that scores a whole group of rollouts at once fails for all of them. One whose weight is 0 only measures: it
takes no reward away, and what it did not measure is no part.
"""

from __future__ import annotations

import base64
import contextvars
import copyreg
import functools
import inspect
import pickle
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

_ASKED: contextvars.ContextVar[int | None] = contextvars.ContextVar("asked", default=None)
"""Which state a reward function is asked about; none: all of them."""
_OURS = {"client"}


class Unsound(Exception):
    """A reward function did not give a number."""


class Rewards:
    """A rubric, whose functions are watched from here on."""

    def __init__(self, rubric: Any) -> None:
        self.rubric = rubric
        self.leaves = leaves(rubric)
        self.grouped = any(leaf._is_group_func(function) for leaf in self.leaves for function in leaf.funcs)
        self.weights = [float(weight) for leaf in self.leaves for weight in leaf.weights]
        self._failed: dict[int | None, str] = {}
        self._unmeasured: dict[int | None, set[str]] = {}
        self._count = 0
        self._asked: set[int] = set()
        for number, leaf in enumerate(self.leaves):
            weighed = zip(leaf.funcs, leaf.weights, strict=True)
            leaf.funcs[:] = [self._watched(number, one, leaf._is_group_func(one), measures=not weight) for one, weight in weighed]
            leaf._call_individual_reward_func = about_one(leaf._call_individual_reward_func)

    @property
    def full(self) -> float:
        """The reward, were every function to give 1; of a group of environments, the largest."""
        return max(full(leaves(one)) for one in routed(self.rubric))

    async def one(self, state: Any) -> dict[str, Any]:
        """A score (see protocol.Score). Raises Unsound."""
        (found,) = await self.score([state])
        if "failed" in found:
            raise Unsound(found["failed"])
        return found

    async def score(self, states: list[Any]) -> list[dict[str, Any]]:
        """For each state a score, or `failed` and why there is none. Raises Unsound where there is none for any."""
        self._failed.clear()
        self._unmeasured.clear()
        self._asked.clear()
        self._count = len(states)
        work = self.rubric.score_group if self.grouped else self.rubric.score_rollout
        more = {"score_sem": Free()} if "score_sem" in inspect.signature(work).parameters else {}
        await work(states if self.grouped else states[0], **more)
        if None in self._failed:
            raise Unsound(self._failed[None])
        return [self._result(state) for state in states]

    def _result(self, state: Any) -> dict[str, Any]:
        failed = self._failed.get(id(state))
        if failed is None and state.get("error") is not None:
            failed = f"the environment says that the episode broke: {state['error']!r}"
        if failed is not None:
            return {"failed": failed}
        unmeasured = self._unmeasured.get(None, set()) | self._unmeasured.get(id(state), set())
        parts = {name: value for name, value in (state.get("metrics") or {}).items() if name not in unmeasured}
        found = {"reward": state.get("reward"), "parts": parts}
        if len(routed(self.rubric)) > 1 and is_number(found["reward"]):
            found["passed"] = float(found["reward"]) >= full([self.leaves[number] for number in self._asked])
        return found

    def _watched(self, leaf: int, function: Callable[..., Any], grouped: bool, *, measures: bool) -> Callable[..., Any]:
        """A reward function whose failures are noted before they are hidden."""
        sound = self._numbers if grouped else self._number
        name = getattr(function, "__name__", repr(function))

        def note(reason: str) -> None:
            if measures:
                self._unmeasured.setdefault(_ASKED.get(), set()).add(name)
            else:
                self._failed.setdefault(_ASKED.get(), reason)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._asked.add(leaf)
            try:
                found = function(*args, **kwargs)
            except Exception as error:
                note(f"reward function {name} raised {type(error).__name__}: {error}")
                raise
            return later(found) if inspect.isawaitable(found) else sound(name, found, note)

        async def later(found: Any) -> Any:
            try:
                return sound(name, await found, note)
            except Exception as error:
                note(f"reward function {name} raised {type(error).__name__}: {error}")
                raise

        return watched

    def _number(self, name: str, found: Any, note: Callable[[str], None]) -> Any:
        if not is_number(found):
            note(f"reward function {name} gave {shown(found)}, which is no number")
        return found

    def _numbers(self, name: str, found: Any, note: Callable[[str], None]) -> Any:
        """A number for each rollout: verifiers takes the first of more, and adds up whatever it is given."""
        found = list(found) if isinstance(found, Sequence) or hasattr(found, "tolist") else found
        if isinstance(found, list) and len(found) == self._count and all(is_number(one) for one in found):
            return [float(one) for one in found]
        what = f"{len(found)} scores" if isinstance(found, list) and len(found) != self._count else shown(found)
        note(f"reward function {name} gave {what} for {self._count} rollouts, which is not a number for each")
        return [0.0] * self._count


class Free:
    """A semaphore that everyone may pass."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *error: object) -> None:
        return None


def about_one(call: Callable[..., Any]) -> Callable[..., Any]:
    """A rubric's way of calling a reward function, with a note of which state it is about."""

    @functools.wraps(call)
    async def called(func: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        token = _ASKED.set(id(state))
        try:
            return await call(func, state, *args, **kwargs)
        finally:
            _ASKED.reset(token)

    return called


def packed(state: Any) -> str:
    """A state as text, for the process in which a whole group is scored. Raises TypeError naming what cannot be taken there."""
    kept = {key: value for key, value in dict.items(state) if key not in _OURS}
    try:
        return base64.b64encode(pickle.dumps((type(state), kept))).decode()
    except Exception as error:
        name = next((key for key, value in kept.items() if not pickles(value)), "")
        said = f"its rewards are over whole groups, and state[{name!r}] cannot be taken to another process: {error}"
        raise TypeError(said) from error


def view(values: dict[Any, Any]) -> Any:
    """A read-only mapping, in which verifiers counts tokens."""
    return MappingProxyType(values)


copyreg.pickle(MappingProxyType, lambda kept: (view, (dict(kept),)))


def pickles(value: Any) -> bool:
    """Whether it can be taken to another process."""
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - it is somebody else's
        return False
    return True


def unpacked(text: str, client: Any) -> Any:
    """The state that was `packed`, by this package, in this sandbox."""
    kind, kept = pickle.loads(base64.b64decode(text))
    return kind({**kept, "client": client})


def full(rubrics: list[Any]) -> float:
    """The reward, were every function to give 1."""
    return sum(float(weight) for one in rubrics for weight in one.weights if weight > 0) or 1.0


def leaves(rubric: Any) -> list[Any]:
    """The rubrics that a rubric is a group of, or itself."""
    if routed(rubric) != [rubric]:
        return [leaf for one in routed(rubric) for leaf in leaves(one)]
    inner = getattr(rubric, "rubrics", None)
    return [leaf for one in inner for leaf in leaves(one)] if inner else [rubric]


def routed(rubric: Any) -> list[Any]:
    """The rubrics of a group of environments, of which one scores an episode; or itself."""
    own = getattr(rubric, "env_map", None)
    return [env.rubric for env in own.values()] if own else [rubric]


def is_number(value: Any) -> bool:
    """Whether it is one and finite; text is none, whatever `float` makes of it."""
    if isinstance(value, (str, bytes)):
        return False
    try:
        return float(value) - float(value) == 0.0
    except Exception:  # noqa: BLE001 - it is somebody else's
        return False


def shown(value: Any) -> str:
    """Short."""
    return f"{value!a:.80} ({type(value).__name__})"
