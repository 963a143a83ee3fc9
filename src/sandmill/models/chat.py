"""The dialogue seam: prompts and observations in as text, token ids out; sampled token ids in, actions out.

A dialogue never re-encodes what the model sampled. Whatever comes from the agent's side (observations) is hostile: control
characters are made visible, and text that spells a special token never becomes one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from sandmill.environments.interaction import Offer
from sandmill.environments.task import Message
from sandmill.errors import ConfigError
from sandmill.models.loading import LoadedModel
from sandmill.models.model import StopReason


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The model asks for a tool. `arguments` are JSON values; the bash tool's is `command`, a string."""

    tool: str
    arguments: Mapping[str, object]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The reply calls no tool: it is the model's answer, unless the environment goes on. `text` is without the words around an answer."""

    text: str


class Malformed(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, or one call in it, that cannot be carried out; `reason` is one sentence fit to show the model."""

    reason: str


Action = Call | Answer | Malformed


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one action: a command's output, or why there was none. `ok` is false when it failed."""

    text: str
    ok: bool = True


class Dialogue(Protocol):
    """How one kind of model writes and reads turns. Stateless: safe for any number of episodes at once."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        ...

    @property
    def rewrites_history(self) -> bool:
        """True where the model's template would rewrite earlier turns, so that a later prompt is no extension of the tokens
        sampled; the sampled tokens are kept all the same."""
        ...

    def open(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The first context: everything up to where the model begins to write."""
        ...

    def parse(self, token_ids: Sequence[int], stop: StopReason) -> tuple[Action, ...]:
        """The actions of a reply, in order; at least one. An Answer is always alone."""
        ...

    def observe(self, outputs: Sequence[Observation], stop: StopReason) -> tuple[int, ...]:
        """The tokens between a reply and the next: ends the reply's turn where it did not end itself, gives one observation per
        action of the reply, and opens the next turn."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens as text, special ones included, for people only."""
        ...

    def reply(self, token_ids: Sequence[int]) -> str:
        """What a reply says, for graders: without the tokens that end it and without special ones."""
        ...


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """`text` with carriage returns as newlines and every other control, bidirectional or surrogate character replaced by U+FFFD."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as mere text: no special token is added, and text that spells one is split or dropped."""
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return [token for token in ids if token not in special]


def dialogue_for(loaded: LoadedModel, kind: str = "auto", offer: Offer | None = None) -> Dialogue:
    """The dialogue of a model: `line`, `chat`, or `auto` (chat where the tokenizer has a chat template). `offer`: None for bash alone."""
    offer = offer or Offer()
    chosen = loaded.dialogue if kind == "auto" else kind
    if chosen == "line":
        from sandmill.models.line_dialogue import LineDialogue

        return LineDialogue(loaded.tokenizer, context_length=loaded.context_length, offer=offer)
    if chosen == "chat":
        from sandmill.models.chat_dialogue import ChatDialogue

        return ChatDialogue(loaded.tokenizer, name=loaded.name, context_length=loaded.context_length, offer=offer)
    raise ConfigError(f"{kind!r} is no dialogue; use line, chat or auto", field="spec.model.dialogue")
