"""The chat dialogue of instruct models: turns in the model's own template, with the environment's tools (bash, unless it says otherwise).

Known models are rendered and parsed by `renderers`, token-exactly; any other by its chat template, where the tokens between two
replies are the difference between the template with and without the new messages. Sampled ids are never rendered again: where a
template would rewrite earlier turns (`rewrites_history`), the ids stay as they were sampled, so every episode is one training row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from sandmill.environments.interaction import Offer
from sandmill.environments.task import Message, Role
from sandmill.environments.tools import BASH
from sandmill.errors import ConfigError
from sandmill.models.chat import Action, Answer, Call, Malformed, Observation, encode_plain, harmless
from sandmill.models.chat_parsing import actions_of, fenced_calls, tagged_calls
from sandmill.models.loading import first_line
from sandmill.models.model import StopReason

_SYSTEM = (
    "Solve the task. You can run shell commands in its folder.{how} When you know the answer, reply with one line: Answer: <the answer>"
)
_FENCED = " To run one, reply with a single fenced block:\n```bash\n<command>\n```\nYou will then be shown its output."
_TOOLS = "Solve the task. You can call tools.{how}"
_TAGGED = (
    " They are:\n{definitions}\nTo call one, reply with its name and arguments as JSON between tags:\n"
    '<tool_call>{{"name": "<name>", "arguments": {{...}}}}</tool_call>\nYou will then be shown its result.'
)
_REPLY = "sandmillreply"
_OUTPUT = "sandmilloutput"
_ASKED: Final[list[dict[str, Any]]] = [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
"""Stands for any opening where only what follows it counts."""


class ChatDialogue:
    """`max_observation_tokens` bounds each observation after encoding; by default a quarter of the context."""

    def __init__(
        self, tokenizer: Any, *, name: str, context_length: int, max_observation_tokens: int | None = None, offer: Offer | None = None
    ) -> None:
        template = str(getattr(tokenizer, "chat_template", None) or "")
        if not template:
            raise ConfigError(f"{name} has no chat template; use the line dialogue", field="spec.model.dialogue")
        self._tokenizer = tokenizer
        self._max_observation_tokens = max_observation_tokens or max(16, context_length // 4)
        self._renderer, self._typed = _renderer(tokenizer)
        self._offer = offer or Offer()
        self._definitions: list[dict[str, Any]] = [json.loads(tool.definition()) for tool in self._offer.tools]
        self._native = self._typed or ("tools" in template and "<tool_call>" in template)
        self._system = self._instructions()
        self._specials = sorted(
            (str(token) for token in tokenizer.added_tokens_decoder.values() if len(str(token)) > 1 and not str(token).isspace()),
            key=len,
            reverse=True,
        )
        try:
            self._close, self._next = self._tail()
        except Exception as error:
            raise ConfigError(f"the chat template of {name} cannot be used ({first_line(error)}); use the line dialogue") from error

    def _instructions(self) -> str | None:
        """The system message where a task brings none."""
        tools = self._offer.tools
        if self._offer.instructions is not None or not tools:
            own, how = self._offer.instructions, "" if self._native or not tools else self._how()
            return own if own is None else own + how
        return (_SYSTEM if tools == (BASH,) else _TOOLS).format(how="" if self._native else self._how())

    def _how(self) -> str:
        """How to call a tool, for a model whose template does not say so."""
        if self._offer.tools == (BASH,):
            return _FENCED
        return _TAGGED.format(definitions="\n".join(json.dumps(one["function"]) for one in self._definitions))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The template's end of turn, whatever the tokenizer calls its end-of-text token."""
        stops = {int(token) for token in self._renderer.get_stop_token_ids()}
        if self._tokenizer.eos_token_id is not None:
            stops.add(int(self._tokenizer.eos_token_id))
        return frozenset(stops | set(self._close[:1]))

    @cached_property
    def rewrites_history(self) -> bool:
        """Renders a finished reply with thinking in it, then the same followed by a tool result, and compares."""
        reply = {"role": "assistant", "content": f"<think>\n{_OUTPUT}\n</think>\n\n{_REPLY}"}
        before = self._render([*_ASKED, reply], generate=False)
        asking = {"role": "user", "content": "x"}
        after = self._render([*_ASKED, reply, asking], generate=False)
        return not after.startswith(before.rstrip()) or _OUTPUT not in before

    def open(self, messages: Sequence[Message]) -> tuple[int, ...]:
        said = [{"role": message.role.value, "content": self._defused(message.text)} for message in messages]
        if self._system is not None and not any(message.role is Role.SYSTEM for message in messages):
            said.insert(0, {"role": Role.SYSTEM.value, "content": self._system})
        return self._opened(said)

    def _opened(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        return tuple(int(token) for token in self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=True))

    def parse(self, token_ids: Sequence[int], stop: StopReason) -> tuple[Action, ...]:
        if stop is not StopReason.STOP:
            return (Malformed(reason="the reply was cut before it ended"),)
        ids = list(token_ids[:-1]) if token_ids and token_ids[-1] in self.stop_ids else list(token_ids)
        if self._typed:
            parsed = self._renderer.parse_response(list(token_ids), tools=self._tools)
            calls: list[Call | Malformed] = [_typed_call(call) for call in parsed.tool_calls]
            text = str(parsed.content)
        else:
            text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
            text = _thoughtless(text)
            calls = tagged_calls(text) if self._native or self._offer.tools != (BASH,) else []
        if not self._offer.tools:
            return (Answer(text=text.strip()),)
        if not calls and self._offer.tool(BASH.name) is not None:
            calls = fenced_calls(text)
        return actions_of(calls, text)

    def observe(self, outputs: Sequence[Observation], stop: StopReason) -> tuple[int, ...]:
        texts = [self._shown(output) for output in outputs]
        bridged = self._bridged(texts, stop) if self._typed else None
        if bridged is not None:
            return bridged
        close = self._close[1:] if stop is StopReason.STOP else self._close
        ids = list(close)
        if not self._native:
            texts = ["\n".join(texts)]
        for index, text in enumerate(texts):
            before, after = self._next
            ids += self._special(before) if index == 0 else self._special(self._between)
            ids += encode_plain(self._tokenizer, text)
            if index == len(texts) - 1:
                ids += self._special(after)
        return tuple(ids)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def reply(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids[:-1]) if token_ids and token_ids[-1] in self.stop_ids else list(token_ids)
        return _thoughtless(str(self._tokenizer.decode(ids, skip_special_tokens=True))).strip()

    @property
    def _tools(self) -> list[dict[str, Any]] | None:
        if not self._native or not self._definitions:
            return None
        return [one["function"] for one in self._definitions] if self._typed else self._definitions

    def _outputs(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        if not self._native:
            return [{"role": "user", "content": "\n".join(texts)}]
        if not self._definitions:
            return [{"role": "user", "content": text} for text in texts]
        name = self._offer.tools[0].name
        return [{"role": "tool", "name": name, "tool_call_id": f"call_{index}", "content": text} for index, text in enumerate(texts)]

    def _shown(self, output: Observation) -> str:
        """Cut to the token bound, told when it failed, and unable to spell a special token."""
        text = self._defused(output.text.rstrip("\n"))
        ids = encode_plain(self._tokenizer, text)
        if len(ids) > self._max_observation_tokens:
            text = str(self._tokenizer.decode(ids[: self._max_observation_tokens])) + "\n[cut]"
        label = "" if self._native or not self._definitions else ("Output:\n" if output.ok else "Error:\n")
        return label + (text or ("(no output)" if output.ok else "(failed without output)"))

    def _defused(self, text: str) -> str:
        text = harmless(text)
        for token in self._specials:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _bridged(self, texts: Sequence[str], stop: StopReason) -> tuple[int, ...] | None:
        """The renderer's own continuation, of a stand-in reply: what follows a turn does not depend on what was said in it."""
        prompt = list(self._opened([{"role": "user", "content": "x"}]))
        reply = [*encode_plain(self._tokenizer, "x"), *(self._close[:1] if stop is StopReason.STOP else ())]
        bridge = self._renderer.bridge_to_next_turn(prompt, reply, self._outputs(texts), tools=self._tools)
        if bridge is None:
            return None
        ids = [int(token) for token in bridge.token_ids]
        return tuple(ids[len(prompt) + len(reply) :]) if ids[: len(prompt) + len(reply)] == prompt + reply else None

    def _render(self, messages: list[dict[str, Any]], *, generate: bool) -> str:
        text = self._tokenizer.apply_chat_template(messages, tools=self._template_tools, tokenize=False, add_generation_prompt=generate)
        return str(text)

    @property
    def _template_tools(self) -> list[dict[str, Any]] | None:
        return self._definitions if self._native and self._definitions else None

    def _tail(self) -> tuple[tuple[int, ...], tuple[str, str]]:
        """What closes a reply, as ids; and the texts before and after an observation, up to where the next reply begins."""
        reply: dict[str, Any] = {"role": "assistant", "content": _REPLY}
        messages = [*_ASKED, reply]
        closed = self._render(messages, generate=False).rpartition(_REPLY)[2]
        going_on = self._render([*messages, *self._outputs([_OUTPUT])], generate=True).rpartition(_REPLY)[2]
        shared = closed if going_on.startswith(closed) else closed.rstrip()
        if not going_on.startswith(shared) or _OUTPUT not in going_on:
            raise ValueError("it does not extend a conversation by a message")
        before, _, after = going_on.removeprefix(shared).partition(_OUTPUT)
        close = tuple(self._special(shared))
        if not close:
            raise ValueError("it does not mark the end of a reply")
        return close, (before, after)

    @cached_property
    def _between(self) -> str:
        """The text between two observations of one reply."""
        messages = [*_ASKED, {"role": "assistant", "content": _REPLY}, *self._outputs([_OUTPUT, _OUTPUT])]
        return self._render(messages, generate=True).split(_OUTPUT)[1]

    def _special(self, text: str) -> list[int]:
        """Template text: here special tokens are meant."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def _renderer(tokenizer: Any) -> tuple[Any, bool]:
    """The model's own renderer, or the generic one; and whether it is its own."""
    from renderers import DefaultRendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    if getattr(tokenizer, "name_or_path", "") in MODEL_RENDERER_MAP:
        return create_renderer(tokenizer), True
    return create_renderer(tokenizer, DefaultRendererConfig()), False


def _thoughtless(text: str) -> str:
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)


def _typed_call(call: Any) -> Call | Malformed:
    from renderers import ToolCallParseStatus

    from sandmill.models.chat_parsing import checked_call

    if call.status is not ToolCallParseStatus.OK:
        return Malformed(reason=f"a tool call could not be read: {str(call.status).replace('_', ' ')}")
    return checked_call(call.name, call.arguments)
