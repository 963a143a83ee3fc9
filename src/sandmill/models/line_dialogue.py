"""The line dialogue: a task line in; `$ command` or `= answer` out; one line per observation.

    Q: how many lines in a.txt ?
    $ wc -l a.txt
    3 a.txt
    = 3

For the tiny agent and for base models, which know no chat template. A newline ends a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandmill.environments.demonstration import Segment
from sandmill.environments.observe import SEPARATOR, observation_line
from sandmill.models.chat import BASH, Action, Answer, Call, Malformed, Observation, encode_plain
from sandmill.models.model import StopReason

SYSTEM_LINE = "Answer each question by running shell commands.\n"


class LineDialogue:
    """Turns as lines. `max_observation_tokens` bounds an observation after encoding; by default a quarter of the context."""

    def __init__(self, tokenizer: Any, *, context_length: int, max_observation_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_observation_tokens = max_observation_tokens or max(8, context_length // 4)
        self._newline = tuple(encode_plain(tokenizer, "\n"))
        self._system = () if _word_level(tokenizer) else tuple(encode_plain(tokenizer, SYSTEM_LINE))
        self._stop_ids = _newline_ids(tokenizer) | frozenset(() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def rewrites_history(self) -> bool:
        return False

    def open(self, prompt: str) -> tuple[int, ...]:
        return (*self._system, *encode_plain(self._tokenizer, f"Q: {observation_line(prompt)}"), *self._newline)

    def parse(self, token_ids: Sequence[int], stop: StopReason) -> tuple[Action, ...]:
        if stop is not StopReason.STOP:
            return (Malformed(reason="the line was cut before it ended"),)
        line = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)).split("\n", 1)[0].strip()
        body = line[1:].strip()
        if line.startswith("$") and body:
            return (Call(tool=BASH, arguments={"command": body}),)
        if line.startswith("="):
            return (Answer(text=body),)
        return (Malformed(reason="a line must begin with $ and a command, or with = and the answer"),)

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


def _word_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and type(backend.model).__name__ == "WordLevel"


def _newline_ids(tokenizer: Any) -> frozenset[int]:
    """Every token whose text contains a newline: raw, byte-level (U+010A) or byte-fallback (<0x0A>) spelling."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    spelled = ("\n", "\u010a", "<0x0A>")
    return frozenset(index for index, token in enumerate(tokens) if token is not None and any(mark in token for mark in spelled))
