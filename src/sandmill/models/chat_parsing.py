"""Calls and answers in a reply's text. In: text that the model wrote, hostile and often broken; out: actions, one per attempt.

A call that cannot be carried out becomes a Malformed in its place, so that its error can go back to the model as that call's result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sandmill.environments.tools import BASH
from sandmill.models.chat import Action, Answer, Call, Malformed

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FENCED = re.compile(r"^```(?:bash|sh|shell)[ \t]*\n(.*?)(^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ANSWER = re.compile(r"^\W*answer\W*?:\**[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE)


def actions_of(calls: Sequence[Call | Malformed], text: str) -> tuple[Action, ...]:
    """Calls where there are any, each distinct one once; else the text after the last `Answer:`; else the whole text as the answer."""
    if calls:
        seen: list[Call | Malformed] = []
        for call in calls:
            repeated = isinstance(call, Call) and call in seen
            seen.append(Malformed(reason="this call repeats an earlier one of the same reply and was not run again") if repeated else call)
        return tuple(seen)
    answers = _ANSWER.findall(text)
    answer = (answers[-1] if answers else text).strip()
    if not answer:
        return (Malformed(reason="the reply has neither a command nor an answer"),)
    return (Answer(text=answer),)


def tagged_calls(text: str) -> list[Call | Malformed]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks (Hermes, Qwen)."""
    calls: list[Call | Malformed] = []
    for body, end in _TAGGED.findall(text):
        if end != "</tool_call>":
            calls.append(Malformed(reason="a tool call was not closed with </tool_call>"))
            continue
        try:
            call = json.loads(body)
        except (ValueError, RecursionError) as error:
            calls.append(Malformed(reason=f"a tool call is not valid JSON: {str(error)[:120]}"))
            continue
        if not isinstance(call, dict):
            calls.append(Malformed(reason="a tool call must be a JSON object with name and arguments"))
            continue
        calls.append(checked_call(call.get("name"), call.get("arguments")))
    return calls


def fenced_calls(text: str) -> list[Call | Malformed]:
    """```bash blocks; each is one call."""
    calls: list[Call | Malformed] = []
    for body, end in _FENCED.findall(text):
        if not end:
            calls.append(Malformed(reason="the bash block was not closed with ```"))
        elif not body.strip():
            calls.append(Malformed(reason="the bash block is empty"))
        else:
            calls.append(Call(tool=BASH.name, arguments={"command": body.rstrip("\n")}))
    return calls


def checked_call(name: Any, arguments: Any) -> Call | Malformed:
    """A call, or what is wrong with it. Arguments may themselves be JSON text."""
    if not isinstance(name, str) or not name:
        return Malformed(reason="a tool call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Malformed(reason=f"the arguments of {name} are not valid JSON: {str(error)[:120]}")
    if not isinstance(arguments, dict):
        return Malformed(reason=f"the call of {name} has no arguments; give them as a JSON object")
    if name == BASH.name and not isinstance(arguments.get("command"), str):
        return Malformed(reason=f'the call of {name} needs the argument "command", a string')
    return Call(tool=name, arguments={str(key): value for key, value in arguments.items()})
