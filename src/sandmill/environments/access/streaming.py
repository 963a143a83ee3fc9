"""A whole chat completion in; the same as the server-sent events of a stream out, for graders that ask for one."""

from __future__ import annotations

from typing import Any

import msgspec


def as_stream(body: bytes) -> bytes:
    """`body`: a reply that was checked. Every choice is one chunk; usage, where the judge gave it, comes last."""
    whole: dict[str, Any] = msgspec.json.decode(body)
    head: dict[str, Any] = {**{key: whole[key] for key in ("id", "created", "model") if key in whole}, "object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = []
    for index, choice in enumerate(whole["choices"]):
        message: dict[str, Any] = choice["message"]
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or ()) if isinstance(call, dict)]
        delta = {"role": "assistant", **message, **({"tool_calls": calls} if calls else {})}
        place = choice.get("index", index)
        chunks.append({**head, "choices": [{"index": place, "delta": delta, "finish_reason": choice.get("finish_reason")}]})
    if whole.get("usage") is not None:
        chunks.append({**head, "choices": [], "usage": whole["usage"]})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + b"data: [DONE]\n\n"
