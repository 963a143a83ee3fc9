"""What a policy did in an episode, call by call, set beside what it wrote: a call arrives here before the words around it are known."""

from __future__ import annotations

import json
from typing import Any


def words(turns: list[dict[str, Any]], messages: list[dict[str, Any]]) -> list[str]:
    """The text of each turn, from the finished conversation. `turns` have a `text` and a `call` (name and arguments, or None); a message
    with several calls stands beside the first of them, and calls that never came here have no turn."""
    left, found = list(turns), []
    for message in messages:
        if message["role"] != "assistant":
            continue
        text = message["text"]
        wanted: list[dict[str, Any] | None] = [called(call) for call in message["calls"]]
        for one in wanted or [None]:
            if left and left[0]["call"] == one:
                left.pop(0)
                found.append(text)
                text = ""
    return found if not left else [one["text"] for one in turns]


def called(call: dict[str, Any]) -> dict[str, Any]:
    """A call as a turn has it."""
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        arguments = call["arguments"]
    return {"name": call["name"], "arguments": arguments}


def unsaid(turns: list[dict[str, Any]], messages: list[dict[str, Any]], limit: str | None) -> str | None:
    """The last reply, where a limit cut it and it never came here; empty where the model had said nothing at all."""
    if limit in ("tokens", "context") and messages and messages[-1]["role"] == "assistant" and not messages[-1]["calls"]:
        return str(messages[-1]["text"])
    return None if turns else ""
