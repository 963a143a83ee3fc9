"""Runs beside an environment package of verifiers 0.1.x, in its sandbox: its rows as tasks, its rubric as the grader.

verifiers turns what a reward function raises into 0.0 and a line in a log; here it is a failure. Its reward functions were written for
messages that are mappings, or objects, or both, depending on the version: a completion here is all of that at once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from turns import unsaid
from verifiers_rollout import Message, Rollout, definitions

AT_ONCE = 16
"""Episodes of one sandbox: each process has threads of its own."""
GROUP = {"states", "prompts", "completions", "answers", "tasks", "infos"}


class Unsound(Exception):
    """A reward function did not give a number."""


class VerifiersV0:
    """One loaded environment."""

    def __init__(self, env: Any, package: str) -> None:
        self.env = env
        self.package = package
        self.failed: list[str] = []
        self.rubrics = leaves(env.rubric)
        for rubric in self.rubrics:
            for name, function, weight in zip(names(rubric), list(rubric.funcs), rubric.weights, strict=False):
                if is_group(function) and weight:
                    raise TypeError(f"reward function {name} scores all replies to a prompt at once; here each reply is graded alone")
            kept = [(one, weight) for one, weight in zip(rubric.funcs, rubric.weights, strict=True) if not is_group(one)]
            rubric.funcs[:], rubric.weights[:] = [self._watched(one) for one, _ in kept], [weight for _, weight in kept]
        self.data = {"train": rows_of(env, "get_dataset")}
        if not self.data["train"] or has_own_eval(env):
            self.data["heldout"] = rows_of(env, "get_eval_dataset")

    def describe(self) -> dict[str, Any]:
        """See protocol.Description. A full reward is the sum of the positive weights, were every function to give 1."""
        meta = importlib.metadata.metadata(self.package).json
        weights = [weight for rubric in self.rubrics for weight in rubric.weights]
        return {
            "name": self.package,
            "version": str(meta.get("version", "0")),
            "licence": str(meta.get("license_expression") or meta.get("license") or "").strip().split("\n")[0][:80],
            "splits": {split: len(rows) for split, rows in self.data.items() if rows},
            "reward": f"the weighted sum of {len([one for one in weights if one])} functions",
            "passes_at": sum(weight for weight in weights if weight > 0) or 1.0,
            "multi_turn": not is_single_turn(self.env),
            "tools": definitions(self.env),
            "finishes_again": True,
            "sessions": AT_ONCE,
        }

    def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row."""
        return [self._row(self.data[split], number) for number in range(start, min(stop, len(self.data[split])))]

    def _row(self, rows: Any, number: int) -> dict[str, Any]:
        row = rows[number]
        prompt = row.get("prompt")
        if not isinstance(prompt, (str, list)) or not prompt:
            raise LookupError(f"row {number}: column 'prompt' is {type(prompt).__name__}, not a text or a list of messages")
        shown = prompt if isinstance(prompt, str) else [self._shown(message, number) for message in prompt]
        return {"prompt": shown, "metadata": {"task": str(row["task"])} if isinstance(row.get("task"), str) else {}, "row": row}

    def _shown(self, message: dict[str, Any], number: int) -> dict[str, str]:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content if part.get("type") in ("text", "input_text"))
        if not isinstance(content, str):
            raise TypeError(f"row {number}: column 'prompt' has a message whose content is a {type(content).__name__}, not text")
        return {"role": str(message.get("role", "user")), "content": content}

    async def grade(self, row: dict[str, Any], answer: str | None, context: dict[str, Any]) -> dict[str, Any]:
        """The rubric's weighted sum; every function's score is a part."""
        if not is_single_turn(self.env):
            raise TypeError("this environment takes part in the dialogue; a single reply cannot be graded")
        state = await self.state(row)
        completion = [Message({"role": "assistant", "content": answer or ""})]
        self.enter(state, state["prompt"], completion)
        return await self.scored(state, completion)

    async def open(self, row: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Opened."""
        self.rollout = Rollout(self.env, given(row), no_model())
        said = await self.rollout.news()
        if said is None:
            raise LookupError("the episode is over before the model has said anything")
        return {"prompt": [{"role": role, "content": text} for role, text in said], "tools": definitions(self.env)}

    async def reply(self, text: str) -> dict[str, Any]:
        """See protocol.Step."""
        return step(await self.rollout.say(text))

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Step."""
        return step(await self.rollout.say("", {"name": tool, "arguments": arguments}))

    async def finish(self, answer: str | None, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The rubric's weighted sum over the whole episode."""
        last = unsaid(self.rollout.mine, messages, limit)
        if last is not None and self.rollout.waits:
            await self.rollout.say(last, cut=True)
        state = await self.rollout.end()
        return await self.scored(state, self.rollout.completion(messages))

    async def state(self, row: dict[str, Any]) -> Any:
        """An episode's beginning, as the environment sets it up."""
        state = await self.env.init_state(given(row), no_model(), "policy", {})
        setup = getattr(self.env, "setup_state", None)
        if setup is not None:
            state = await setup(state) or state  # older ones return it, newer ones change it
        return state

    def enter(self, state: Any, prompt: Any, completion: list[Message]) -> None:
        """One turn of the policy."""
        state["trajectory"].append(
            {
                "prompt": prompt,
                "completion": completion,
                "response": None,
                "tokens": None,
                "reward": None,
                "advantage": None,
                "is_truncated": False,
                "trajectory_id": state.get("trajectory_id") or uuid.uuid4().hex,
                "extras": {},
            }
        )

    async def scored(self, state: Any, completion: list[Any]) -> dict[str, Any]:
        """What the rubric says to a finished episode."""
        state["completion"] = completion
        state["is_completed"] = True
        if isinstance(state.get("timing"), dict):
            state["timing"].setdefault("start_time", time.time())
        self.failed.clear()
        score = self.env.rubric.score_rollout
        more = {"score_sem": Free()} if "score_sem" in inspect.signature(score).parameters else {}
        await score(state, **more)
        if self.failed:
            raise Unsound(self.failed[0])
        if state.get("error") is not None:
            raise Unsound(f"the environment says that the episode broke: {state['error']!r}")
        return {"reward": state.get("reward"), "parts": state.get("metrics") or {}}

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A reward function whose failures are noted before they are hidden."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                found = function(*args, **kwargs)
            except Exception as error:
                self.failed.append(f"reward function {name} raised {type(error).__name__}: {error}")
                raise
            return later(found) if inspect.isawaitable(found) else self._number(name, found)

        async def later(found: Any) -> Any:
            try:
                return self._number(name, await found)
            except Exception as error:
                self.failed.append(f"reward function {name} raised {type(error).__name__}: {error}")
                raise

        name = getattr(function, "__name__", repr(function))
        return watched

    def _number(self, name: str, found: Any) -> Any:
        if isinstance(found, (str, bytes, type(None))):
            self.failed.append(f"reward function {name} gave {found!a:.80} ({type(found).__name__}), which is no number")
        return found


def given(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a rollout takes it."""
    return {**row, "info": json.loads(row["info"])} if isinstance(row.get("info"), str) else dict(row)


def step(said: list[tuple[str, str]] | None) -> dict[str, Any]:
    """See protocol.Step."""
    return {"observation": "\n".join(text for _, text in said or []), "done": said is None}


class Free:
    """A semaphore that everyone may pass."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *error: object) -> None:
        return None


def leaves(rubric: Any) -> list[Any]:
    """The rubrics that a rubric is a group of, or itself."""
    inner = getattr(rubric, "rubrics", None)
    return [leaf for one in inner for leaf in leaves(one)] if inner else [rubric]


def names(rubric: Any) -> list[str]:
    """Of its functions."""
    return [getattr(function, "__name__", repr(function)) for function in rubric.funcs]


def is_group(function: Callable[..., Any]) -> bool:
    """Whether verifiers would give it all replies to a prompt at once."""
    signature = inspect.signature(function)
    returned = signature.return_annotation
    text = returned if isinstance(returned, str) else getattr(getattr(returned, "__origin__", returned), "__name__", "")
    return bool(set(signature.parameters) & GROUP) or str(text).partition("[")[0] in ("list", "List")


def is_single_turn(env: Any) -> bool:
    """Whether the first reply ends an episode."""
    import verifiers

    return isinstance(env, verifiers.SingleTurnEnv)


def has_own_eval(env: Any) -> bool:
    """Whether there is a held-out set; without one, verifiers gives the training set for it."""
    return getattr(env, "eval_dataset", None) is not None or getattr(env, "eval_dataset_source", None) is not None


def rows_of(env: Any, method: str) -> Any:
    """A data set of the environment; nothing where it has none."""
    try:
        return getattr(env, method)()
    except ValueError:
        return []


def no_model() -> Any:
    """A client that cannot reach any model: graders that ask one fail."""
    try:
        from verifiers.clients import Client
    except ImportError:
        return None

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("this environment asks a model, and has none here")

    kind = type("NoModel", (Client,), dict.fromkeys(Client.__abstractmethods__, refuse))
    return object.__new__(kind)


def load(options: dict[str, Any]) -> VerifiersV0:
    """The environment that `load_environment(**arguments)` of a module makes. On the main thread: it sets signal handlers."""
    module = importlib.import_module(options["module"])
    maker = getattr(module, "load_environment", None)
    if maker is None:
        raise AttributeError(f"module {options['module']} has no load_environment(); name the one that has by the option module")
    return VerifiersV0(maker(**options["arguments"]), options["package"])
