"""The line dialogue: a task line in; `$ command` or `= answer` out; one line per observation.

    Q: how many lines in a.txt ?
    $ wc -l a.txt
    3 a.txt
    = 3

For the tiny agent and for base models, which know no chat template. A newline ends a reply. Where the tool is not bash, `$ TEXT` means
it with TEXT as its first argument; where there are several, `$ NAME TEXT` or `$ NAME {"argument": ...}`. Without tools every line is
the answer, with or without its mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandmill.environments.demonstration import Segment
from sandmill.environments.interaction import Offer
from sandmill.environments.observe import SEPARATOR, observation_line
from sandmill.environments.task import Message
from sandmill.environments.tools import BASH, Tool
from sandmill.models.chat import Action, Answer, Call, Malformed, Observation, encode_plain
from sandmill.models.chat_parsing import checked_call
from sandmill.models.model import StopReason

SYSTEM_LINE = "Answer each question by running shell commands.\n"
_ANSWER_LINE = "Answer each question.\n"
_TOOLS_LINE = "Answer each question, or call a tool by $ and its name first: {names}.\n"


class LineDialogue:
    """Turns as lines. `max_observation_tokens` bounds an observation after encoding; by default a quarter of the context."""

    def __init__(
        self, tokenizer: Any, *, context_length: int, max_observation_tokens: int | None = None, offer: Offer | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = {tool.name: tool for tool in (offer or Offer()).tools}
        self._max_observation_tokens = max_observation_tokens or max(8, context_length // 4)
        self._newline = tuple(encode_plain(tokenizer, "\n"))
        self._system = () if _word_level(tokenizer) else tuple(encode_plain(tokenizer, self._system_line()))
        self._stop_ids = _newline_ids(tokenizer) | frozenset(() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def rewrites_history(self) -> bool:
        return False

    def _system_line(self) -> str:
        if list(self._tools.values()) == [BASH]:
            return SYSTEM_LINE
        return _TOOLS_LINE.format(names=", ".join(self._tools)) if self._tools else _ANSWER_LINE

    def open(self, messages: Sequence[Message]) -> tuple[int, ...]:
        prompt = "\n".join(message.text for message in messages)
        return (*self._system, *encode_plain(self._tokenizer, f"Q: {observation_line(prompt)}"), *self._newline)

    def parse(self, token_ids: Sequence[int], stop: StopReason) -> tuple[Action, ...]:
        if stop is not StopReason.STOP:
            return (Malformed(reason="the line was cut before it ended"),)
        line = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)).split("\n", 1)[0].strip()
        body = line[1:].strip()
        if line.startswith("="):
            return (Answer(text=body),)
        if not self._tools:
            return (Answer(text=line),)
        if line.startswith("$") and body:
            return (self._call(body),)
        return (Malformed(reason="a line must begin with $ and a command, or with = and the answer"),)

    def _call(self, body: str) -> Call | Malformed:
        if len(self._tools) == 1:
            (tool,) = self._tools.values()
            return _called(tool, body)
        name, _, rest = body.partition(" ")
        if name in self._tools:
            return _called(self._tools[name], rest.strip())
        if BASH.name in self._tools:
            return _called(BASH, body)
        return Malformed(reason=f"there is no tool {name!r}; there are: {', '.join(self._tools)}")

    def observe(self, outputs: Sequence[Observation], stop: StopReason) -> tuple[int, ...]:
        lead = () if stop is StopReason.STOP else self._newline
        text = SEPARATOR.join(observation_line(output.text, ok=output.ok) for output in outputs)
        return (*lead, *encode_plain(self._tokenizer, text)[: self._max_observation_tokens], *self._newline)

    def encode_segments(self, segments: Sequence[Segment]) -> tuple[list[int], list[float]]:
        """Lines of a scripted episode as (ids, weights), spelled exactly as an episode's own contexts are; the system line weighs 0."""
        ids = list(self._system)
        weights = [0.0] * len(ids)
        for segment in segments:
            for line in segment.text.removesuffix("\n").split("\n"):
                encoded = [*encode_plain(self._tokenizer, line), *self._newline]
                ids += encoded
                weights += [segment.weight] * len(encoded)
        return ids, weights

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def reply(self, token_ids: Sequence[int]) -> str:
        line = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)).split("\n", 1)[0].strip()
        return line[1:].strip() if line.startswith("=") else line


def _called(tool: Tool, text: str) -> Call | Malformed:
    """A call of `tool` with JSON arguments, or with `text` as its first one."""
    if tool != BASH and text.startswith("{"):
        return checked_call(tool.name, text)
    first = tool.first_parameter
    return Call(tool=tool.name, arguments={} if first is None else {first: text})


def _word_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and type(backend.model).__name__ == "WordLevel"


def _newline_ids(tokenizer: Any) -> frozenset[int]:
    """Every token whose text contains a newline: raw, byte-level (U+010A) or byte-fallback (<0x0A>) spelling."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    spelled = ("\n", "\u010a", "<0x0A>")
    return frozenset(index for index, token in enumerate(tokens) if token is not None and any(mark in token for mark in spelled))
