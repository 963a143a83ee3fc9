"""A judge model behind an OpenAI-compatible endpoint. In: a grader's chat-completions request. Out: a whole, checked reply; or JudgeFailed.

The key stays in this process: it is in no sandbox, no record and no message. A reply is asked for whole, never as a stream, so that one
which breaks off is seen as such before a grader sees any of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import msgspec
from msgspec import Meta

from sandmill.environments.verdicts import reason_of
from sandmill.errors import ConfigError, JudgeFailed

if TYPE_CHECKING:
    import httpx

_LARGEST_REPLY_BYTES: Final = 8 << 20
_PASSING: Final = frozenset({408, 409, 425, 429})
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0
_SAID: Final = 200
Count = Annotated[int, Meta(ge=0)]


class Usage(msgspec.Struct, frozen=True):
    """Tokens, as the judge counts them."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Words(msgspec.Struct, frozen=True):
    """What the judge says."""

    content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One reply."""

    message: Words
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True):
    """The part of a reply that is looked at."""

    choices: Annotated[tuple[Choice, ...], Meta(min_length=1)]
    usage: Usage | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's reply: its bytes, which are a JSON object, and what they say."""

    body: bytes
    completion: Completion


class Sent(msgspec.Struct, kw_only=True):
    """What became of the times that a request was sent."""

    unknown: int = 0
    """Those that may have cost something, of which nobody said how much. Right at any moment, also when the asking is cancelled."""


class Judge(Protocol):
    """A model that can be asked."""

    async def ask(self, request: Mapping[str, Any], sent: Sent) -> Reply:
        """The reply to one chat-completions request; `sent` is kept up to date meanwhile. Raises JudgeFailed. May be cancelled."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class Endpoint:
    """A `Judge` at a URL. `model`: the endpoint's name for it; `key`: sent as a bearer token, empty for none."""

    def __init__(self, url: str, model: str, key: str, *, retries: int) -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._key = key
        self._retries = retries
        self._client: httpx.AsyncClient | None = None

    async def ask(self, request: Mapping[str, Any], sent: Sent) -> Reply:
        """See `Judge`. A request that the endpoint cannot answer just now is sent again; how long that may take is the caller's to say."""
        asked = {key: value for key, value in request.items() if key not in ("stream", "stream_options")}
        body = msgspec.json.encode({**asked, "model": self._model})
        for attempt in range(self._retries + 1):
            try:
                reply = reply_of(await self._sent(body, sent))
                sent.unknown -= reply.completion.usage is not None
                return reply
            except JudgeFailed as error:
                if not error.retryable or attempt == self._retries:
                    raise
                pause_s = _FIRST_PAUSE_S * 2**attempt if not isinstance(error, _Later) else error.pause_s
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """See `Judge`."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _sent(self, body: bytes, sent: Sent) -> bytes:
        """The body of a reply, which counts as unknown. An endpoint that refuses charges nothing."""
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=64))
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self._key}"} if self._key else {})}
        sent.unknown += 1
        try:
            async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
                found = await _whole(response)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            sent.unknown -= isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol | httpx.InvalidURL)
            raise JudgeFailed(f"the judge could not be asked: {self._safe(reason_of(error))}", retryable=True) from None
        if response.status_code == 200:
            return found
        sent.unknown -= 1
        said = self._safe(found[:_SAID].decode("utf-8", "replace"))
        reason = f"the judge answered {response.status_code}: {said!a}"
        if response.status_code in _PASSING or response.status_code >= 500:
            raise _Later(reason, response.headers.get("retry-after", ""))
        raise JudgeFailed(reason, retryable=False)

    def _safe(self, text: str) -> str:
        """Some endpoints repeat the key that they refuse."""
        return text.replace(self._key, "(the key)") if self._key else text


class _Later(JudgeFailed):
    """The endpoint says when to come again."""

    def __init__(self, reason: str, after: str) -> None:
        super().__init__(reason, retryable=True)
        self.pause_s = float(after) if after.isdecimal() and len(after) < 10 else _FIRST_PAUSE_S


async def _whole(response: httpx.Response) -> bytes:
    found = bytearray()
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) > _LARGEST_REPLY_BYTES:
            raise JudgeFailed(f"the judge's reply has more than {_LARGEST_REPLY_BYTES} bytes", retryable=False)
    return bytes(found)


def reply_of(body: bytes) -> Reply:
    """What an endpoint sent as a reply. Raises JudgeFailed for what is none, and for one that says nothing at all."""
    try:
        completion = msgspec.json.decode(body, type=Completion)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise JudgeFailed(f"the judge's reply is none: {reason_of(error)}", retryable=True) from None
    for choice in completion.choices:
        if not (choice.message.content or "").strip() and not choice.message.tool_calls:
            raise JudgeFailed(f"the judge said nothing (finish_reason {choice.finish_reason!a})", retryable=True)
    return Reply(body=body, completion=completion)


def key_of(variable: str | None, field: str) -> str:
    """The key in an environment variable of this process. Raises ConfigError when it is not set."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} is not set: put the judge's key into it", field=field)
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the environment variable {variable} has characters that no key has", field=field)
    return key


__all__ = ["Completion", "Endpoint", "Judge", "Reply", "Sent", "key_of", "reply_of"]
