"""An episode of verifiers 0.1.x in which the environment takes part: its own rollout runs, and asks us where it would ask a model.

Nothing of its loop is imitated: set-up, replies, tools, stop conditions, clean-up and their order are verifiers' own. A turn with several
calls reaches it as several turns with a call each; what the model wrote beside a call is put into the completion before it is graded.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from turns import words

MODEL = "policy"


class Message(dict):  # type: ignore[type-arg]
    """A message, or a call in one, by key and by attribute, and of verifiers' own class: reward functions were written for any of these."""

    def __init__(self, fields: dict[str, Any], kind: type | None = None) -> None:
        super().__init__(fields)
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name == "__pydantic_decorator_info__" and self._kind is not None:
            return None  # asked before an object counts as an instance of a model
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_kind":
            super().__setattr__(name, value)
        else:
            self[name] = value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind or Message

    def __reduce__(self) -> Any:
        return Message, (dict(self), self._kind)


class Rollout:
    """One episode, in a process of its own."""

    def __init__(self, env: Any, row: dict[str, Any], client: Any) -> None:
        self.env = env
        self.state: Any = None
        self.asked: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.told: asyncio.Future[Any] | None = None
        self.seen: list[tuple[str, str]] = []
        self.mine: list[dict[str, Any]] = []
        for one in [env, *(getattr(env, "envs", None) or [])]:  # a group of environments hands its rollouts on
            one.get_model_response = self._model
        self.task = asyncio.ensure_future(env.rollout(row, client, MODEL, {}))

    async def _model(self, state: Any, prompt: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(prompt, list):
            raise TypeError("this environment prompts with plain text; only those that converse in messages can be played")
        self.state = state
        self.told = asyncio.get_running_loop().create_future()
        self.asked.set_result(prompt)
        return await self.told

    async def news(self) -> list[tuple[str, str]] | None:
        """What was said since the model last spoke, as roles and texts; None when the episode is over."""
        await asyncio.wait({self.asked, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not self.asked.done():
            self.state = self.task.result()
            if self.state.get("error") is not None:
                raise RuntimeError(f"the environment says that the episode broke: {self.state['error']!r}")
            return None
        prompt = [spoken(message) for message in self.asked.result()]
        self.asked = asyncio.get_running_loop().create_future()
        known, self.seen = self.seen, prompt
        if prompt[: len(known)] != known:
            raise TypeError("this environment rewrites what was said before, which tokens that were sampled do not allow")
        return prompt[len(known) :]

    @property
    def waits(self) -> bool:
        """Whether it is the model's turn."""
        return not self.task.done()

    async def say(self, text: str, call: dict[str, Any] | None = None, cut: bool = False) -> list[tuple[str, str]] | None:
        """The model's turn; then as `news`."""
        assert self.told is not None
        self.seen.append(("assistant", text))
        self.mine.append({"text": text, "call": call})
        calls = (
            None if call is None else [{"id": f"call_{len(self.mine)}", "name": call["name"], "arguments": json.dumps(call["arguments"])}]
        )
        self.told.set_result(response(text, calls, cut))
        return await self.news()

    async def end(self) -> Any:
        """The state, once the rollout has ended; one that still waits for the model ends as it does when the model's context is full."""
        if not self.task.done():
            import verifiers

            assert self.told is not None
            self.told.set_exception(verifiers.OverlongPromptError("the policy says no more"))
        return await self.task

    def completion(self, messages: list[dict[str, Any]]) -> list[Message]:
        """What was said after the prompt, with the words that the model wrote beside its calls."""
        said = words(self.mine, messages)
        found = []
        for message in self.state["completion"] or []:
            fields = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
            if fields.get("role") == "assistant" and said:
                fields = {**fields, "content": said.pop(0)}
            calls = [Message(both_ways(one), kind("ToolCall")) for one in fields.get("tool_calls") or []]
            names = {"assistant": "AssistantMessage", "tool": "ToolMessage", "user": "UserMessage", "system": "SystemMessage"}
            own = {**fields, "tool_calls": calls} if calls else {key: value for key, value in fields.items() if key != "tool_calls"}
            if kind("AssistantMessage") is not None and fields.get("role") == "assistant":
                own.setdefault("tool_calls", None)
            found.append(Message(own, kind(names.get(str(fields.get("role")), ""))))
        return found


def kind(name: str) -> type | None:
    """A class of verifiers' own messages, in the versions that have them."""
    import verifiers.types as types

    found = getattr(types, name, None)
    return found if isinstance(found, type) and hasattr(found, "model_validate") else None


def both_ways(call: dict[str, Any]) -> dict[str, Any]:
    """A call in the spelling of OpenAI and in verifiers' own."""
    function = call.get("function") or {"name": call.get("name"), "arguments": call.get("arguments")}
    more = {} if kind("ToolCall") is None else {"name": function["name"], "arguments": function["arguments"]}
    return {"id": call.get("id"), "type": "function", "function": Message(function), **more}


def response(text: str, calls: list[dict[str, str]] | None, cut: bool) -> Any:
    """What a model would have answered, in the class that this version of verifiers takes it in."""
    import verifiers.types as types

    reason = "length" if cut else "tool_calls" if calls else "stop"
    if kind("ResponseMessage") is not None:
        message = types.ResponseMessage(content=text, tool_calls=calls, finish_reason=reason, is_truncated=cut)
        return types.Response(id="0", created=int(time.time()), model=MODEL, message=message)
    from openai.types.chat import ChatCompletion

    said: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        said["tool_calls"] = [{"id": call["id"], "type": "function", "function": one} for call, one in zip(calls, functions, strict=True)]
    choice = {"index": 0, "finish_reason": reason, "message": said}
    whole = {"id": "0", "object": "chat.completion", "created": int(time.time()), "model": MODEL, "choices": [choice]}
    return ChatCompletion.model_validate(whole)


def spoken(message: Any) -> tuple[str, str]:
    """A message's role and text."""
    role, content = message["role"], message["content"]
    if isinstance(content, list):
        content = "".join(str(part["text"]) for part in content if part["type"] in ("text", "input_text"))
    return str(role), "" if content is None else str(content)


def definitions(env: Any) -> list[str]:
    """The environment's tools, or those of all the environments that it is a group of, as function definitions."""
    found = [one for inner in getattr(env, "envs", None) or [] for one in definitions(inner)]
    for tool in getattr(env, "tool_defs", None) or getattr(env, "oai_tools", None) or []:
        fields = tool if isinstance(tool, dict) else tool.model_dump()
        function = fields.get("function") or fields
        own = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        found.append(json.dumps({"type": "function", "function": own}))
    return found
