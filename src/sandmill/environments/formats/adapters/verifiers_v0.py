"""Runs beside an environment package of verifiers 0.1.x, in its sandbox: its rows as tasks, its rubric as the grader.

Its reward functions were written for messages that are mappings, or objects, or both, depending on the version: a completion here is all
of that at once. Where they score whole groups of rollouts, each episode's state is handed over to one process that scores them together.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import time
import uuid
from typing import Any

from turns import unsaid
from verifiers_rewards import Rewards, packed, unpacked
from verifiers_rollout import Message, Rollout, definitions

AT_ONCE = 16
"""Episodes of one sandbox: each process has threads of its own."""


class VerifiersV0:
    """One loaded environment."""

    def __init__(self, env: Any, package: str) -> None:
        self.env = env
        self.package = package
        self.rewards = Rewards(env.rubric)
        self.data = {"train": rows_of(env, "get_dataset")}
        if not self.data["train"] or has_own_eval(env):
            self.data["heldout"] = rows_of(env, "get_eval_dataset")

    def describe(self) -> dict[str, Any]:
        """See protocol.Description. A full reward is the sum of the positive weights, were every function to give 1."""
        meta = importlib.metadata.metadata(self.package).json
        return {
            "name": self.package,
            "version": str(meta.get("version", "0")),
            "licence": str(meta.get("license_expression") or meta.get("license") or "").strip().split("\n")[0][:80],
            "splits": {split: len(rows) for split, rows in self.data.items() if rows},
            "reward": f"the weighted sum of {len([one for one in self.rewards.weights if one])} functions",
            "passes_at": self.rewards.full,
            "grouped": self.rewards.grouped,
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
        found: dict[str, Any] = await self.rewards.one(await self.replied(row, answer))
        return found

    async def grade_group(self, row: dict[str, Any], members: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rubric over a whole group: replies to a row, or episodes as `hand_over` left them. See protocol.Member."""
        states = [unpacked(one["state"], no_model()) if "state" in one else await self.replied(row, one["answer"]) for one in members]
        found: list[dict[str, Any]] = await self.rewards.score(states)
        return found

    async def open(self, row: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Opened."""
        self.rollout = Rollout(self.env, given(row), no_model())
        said = await self.rollout.news()
        if said is None:
            raise LookupError("the episode is over before the model has said anything")
        if self.rewards.grouped:
            packed(self.rollout.state)  # one that cannot be handed over is refused before a token is sampled
        return {"prompt": [{"role": role, "content": text} for role, text in said], "tools": definitions(self.env)}

    async def reply(self, text: str) -> dict[str, Any]:
        """See protocol.Step."""
        return step(await self.rollout.say(text))

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Step."""
        return step(await self.rollout.say("", {"name": tool, "arguments": arguments}))

    async def finish(self, answer: str | None, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The rubric's weighted sum over the whole episode."""
        found: dict[str, Any] = await self.rewards.one(await self.ended(limit, messages))
        return found

    async def hand_over(self, answer: str | None, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole episode, to be scored with the others of its group. See protocol.HandedOver."""
        return {"state": packed(await self.ended(limit, messages))}

    async def ended(self, limit: str | None, messages: list[dict[str, Any]]) -> Any:
        """The episode's state at its end."""
        last = unsaid(self.rollout.mine, messages, limit)
        if last is not None and self.rollout.waits:
            await self.rollout.say(last, cut=True)
        return completed(await self.rollout.end(), self.rollout.completion(messages))

    async def replied(self, row: dict[str, Any], answer: str | None) -> Any:
        """The state of an episode that is one reply."""
        state = await self.state(row)
        completion = [Message({"role": "assistant", "content": answer or ""})]
        self.enter(state, state["prompt"], completion)
        return completed(state, completion)

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


def completed(state: Any, completion: list[Any]) -> Any:
    """The state of a finished episode."""
    state["completion"] = completion
    state["is_completed"] = True
    if isinstance(state.get("timing"), dict):
        state["timing"].setdefault("start_time", time.time())
    return state


def given(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a rollout takes it."""
    return {**row, "info": json.loads(row["info"])} if isinstance(row.get("info"), str) else dict(row)


def step(said: list[tuple[str, str]] | None) -> dict[str, Any]:
    """See protocol.Step."""
    return {"observation": "\n".join(text for _, text in said or []), "done": said is None}


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
