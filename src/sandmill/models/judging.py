"""A judge that is one of our own models, sampled in this process. In: a chat-completions request. Out: a reply in the same form.

It is asked like an endpoint, and like one it never sees what graders keep to themselves. Without a temperature in the request it is greedy;
the same request has the same reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from sandmill.config.manifest import JudgeSection
from sandmill.environments.access.judge import Reply, Sent, reply_of
from sandmill.environments.interaction import Offer
from sandmill.environments.task import Message, Role
from sandmill.errors import ContextFull, JudgeFailed, ModelError
from sandmill.models.model import Sampling, StopReason

if TYPE_CHECKING:
    from sandmill.models.chat import Dialogue
    from sandmill.models.engines.torch import TorchEngine
    from sandmill.models.loading import LoadedModel

_ROWS: Final = 4
_REPLY_TOKENS: Final = 512
_FINISH: Final = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.CONTEXT: "length"}


class _Part(msgspec.Struct, frozen=True):
    text: str = ""


class _Said(msgspec.Struct, frozen=True):
    role: str
    content: str | tuple[_Part, ...] | None = None


class _Request(msgspec.Struct, frozen=True):
    messages: Annotated[tuple[_Said, ...], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    seed: int | None = None


class EmbeddedJudge:
    """A `Judge`. `uri` as in `spec.model.uri`. Loads the model when it is first asked, unless `of` has."""

    def __init__(self, name: str, uri: str) -> None:
        self._name = name
        self._uri = uri
        self._loaded: LoadedModel | None = None
        self._served: tuple[TorchEngine, Dialogue] | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def of(cls, section: JudgeSection) -> EmbeddedJudge:
        """Of a manifest, its model loaded. Raises ModelNotFound."""
        judge = cls(section.name, section.uri or "")
        judge._load()
        return judge

    async def ask(self, request: Mapping[str, Any], sent: Sent) -> Reply:
        """See `Judge`. It costs nothing but this machine's time."""
        try:
            asked = msgspec.convert(request, _Request)
            said = [Message(role=Role(one.role), text=_text(one)) for one in asked.messages]
        except (msgspec.ValidationError, ValueError) as error:
            raise JudgeFailed(f"judge {self._name} cannot read the request: {error}", retryable=False) from None
        try:
            engine, dialogue = await self._engine()
            return await self._replied(asked, engine, dialogue, said)
        except ContextFull as error:
            raise JudgeFailed(f"judge {self._name} cannot take the request: {error}", retryable=False) from None
        except ModelError as error:
            raise JudgeFailed(f"judge {self._name} cannot be asked: {error}", retryable=True) from None

    async def close(self) -> None:
        """See `Judge`."""
        served, self._served = self._served, None
        if served is not None:
            await served[0].close()

    async def _replied(self, asked: _Request, engine: TorchEngine, dialogue: Dialogue, said: Sequence[Message]) -> Reply:
        context = dialogue.open(said)
        sampling = Sampling(
            max_new_tokens=min([_REPLY_TOKENS, *(most for most in (asked.max_tokens, asked.max_completion_tokens) if most)]),
            stop_ids=dialogue.stop_ids,
            temperature=asked.temperature or 0.0,
            top_p=asked.top_p or 1.0,
        )
        root = hashlib.sha256(msgspec.json.encode(asked)).digest()
        choices, sampled = [], 0
        for index in range(asked.n or 1):
            session = await engine.session(seed=int.from_bytes(root[:7]) + index)
            try:
                sample = await session.sample(context, sampling)
            finally:
                await session.close()
            sampled += len(sample.token_ids)
            message = {"role": "assistant", "content": dialogue.reply(sample.token_ids)}
            choices.append({"index": index, "message": message, "finish_reason": _FINISH[sample.stop]})
        usage = {"prompt_tokens": len(context), "completion_tokens": sampled, "total_tokens": len(context) + sampled}
        whole = {"id": f"judge-{root.hex()[:16]}", "object": "chat.completion", "created": int(time.time()), "model": self._name}
        return reply_of(msgspec.json.encode({**whole, "choices": choices, "usage": usage}))

    async def _engine(self) -> tuple[TorchEngine, Dialogue]:
        async with self._starting:
            if self._served is None:
                self._served = self._serve(await asyncio.to_thread(self._load))
            return self._served

    def _serve(self, loaded: LoadedModel) -> tuple[TorchEngine, Dialogue]:
        from sandmill.models.chat import dialogue_for
        from sandmill.models.engines.torch import TorchEngine

        dialogue = dialogue_for(loaded, "auto", Offer(tools=()))
        return TorchEngine(loaded, rows=_ROWS, threads=1), dialogue

    def _load(self) -> LoadedModel:
        from sandmill.models.loading import load

        if self._loaded is None:
            self._loaded = load(self._uri)
        return self._loaded


def _text(said: _Said) -> str:
    if isinstance(said.content, tuple):
        return "".join(part.text for part in said.content)
    return said.content or ""
