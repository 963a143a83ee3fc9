"""Between a grader in its sandbox and what it may ask. In: one HTTP request of a grader at a time. Out: an answer, and a note of it.

    POST /v1/chat/completions   a judge, by its name as `model`
    GET  /v1/models             the judges there are
    POST /mcp/NAME              a tool server (see `tools`)

Whatever does not come to an answer is noted with the attempt's meter, so that a grader which catches the error gives no verdict by it.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from sandmill.accounts.prices import TokenPrices, Usage, total
from sandmill.environments.access.judge import Judge, Reply, Sent
from sandmill.environments.access.meter import JudgeCall, Meter, Spent
from sandmill.environments.access.streaming import as_stream
from sandmill.environments.access.tools import Served
from sandmill.environments.mcp.connections import Connections
from sandmill.environments.task import Boundary, InfrastructureFailure
from sandmill.environments.verdicts import reason_of
from sandmill.errors import GraderFailed, JudgeFailed

JSON: Final = "application/json"
_BYTES_OF_A_TOKEN: Final = 16
"""More than any language's text has on average."""
_AT_ONCE: Final = 64
"""Requests of one grading."""


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A grader's request."""

    method: str
    path: str
    body: bytes = b""
    refused: str = ""
    """Why it is none that could be served, where its sandbox says so."""


class Told(NamedTuple):
    """What it is answered."""

    status: int
    body: bytes
    kind: str = JSON


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What one grading may use of one judge. `prices` of None: unknown."""

    max_requests: int
    max_tokens: int
    max_cost_microusd: int | None
    timeout_s: float
    prices: TokenPrices | None


class Broker:
    """Judges and tool servers by their names. One for a run; `asker` makes what serves one grading."""

    def __init__(self, judges: Mapping[str, tuple[Judge, Terms]], tools: Connections, *, at_once: int) -> None:
        self.judges = judges
        self.tools = tools
        self._at_once = at_once
        self._places: asyncio.Semaphore | None = None

    def asker(self, meter: Meter) -> Asker:
        """Serves one grading, or one episode and its grading."""
        return Asker(self, meter)

    def place(self) -> asyncio.Semaphore:
        """Held while a judge is asked."""
        self._places = self._places or asyncio.Semaphore(self._at_once)
        return self._places

    async def close(self) -> None:
        """Idempotent."""
        await self.tools.close()
        for judge, _ in self.judges.values():
            await judge.close()


class Asker:
    """Answers the requests of one grading. On the sandbox loop."""

    def __init__(self, broker: Broker, meter: Meter) -> None:
        self._broker = broker
        self._meter = meter
        self._served = Served(broker.tools)
        self._running: dict[asyncio.Task[None], Boundary] = {}

    def hear(self, heard: Heard, tell: Callable[[Told], None]) -> None:
        """Begins to answer a request; `tell` is called once, unless `close` is first."""
        if len(self._running) >= _AT_ONCE:
            self._note(Boundary.JUDGE, f"more than {_AT_ONCE} requests at once", retryable=False)
            tell(_error(503, "too many requests at once"))
            return
        path = heard.path.partition("?")[0].rstrip("/")
        boundary = Boundary.MCP if path.startswith("/mcp/") else Boundary.JUDGE
        task = asyncio.ensure_future(self._answered(path, boundary, heard, tell))
        self._running[task] = boundary
        task.add_done_callback(self._running.pop)

    async def close(self) -> None:
        """Ends what is still asked, which counts as failed, and this grading's own tool servers. Idempotent."""
        running = dict(self._running)
        for task, boundary in running.items():  # noted here: one that has not begun yet would never notice
            self._note(boundary, "the grader's time was over before its request was answered", retryable=True)
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._served.close()

    async def _answered(self, path: str, boundary: Boundary, heard: Heard, tell: Callable[[Told], None]) -> None:
        try:
            told = await self._answer(path, heard)
        except JudgeFailed as error:
            self._note(boundary, error.reason, retryable=error.retryable)
            told = _error(502 if error.retryable else 400, error.reason)
        except GraderFailed as error:
            self._note(boundary, str(error), retryable=False)
            told = _error(400, str(error))
        except Exception as error:  # noqa: BLE001 - told to the grader, and kept
            self._note(boundary, reason_of(error), retryable=True)
            told = _error(502, reason_of(error))
        tell(told)

    async def _answer(self, path: str, heard: Heard) -> Told:
        if heard.refused:
            raise JudgeFailed(heard.refused[:200], retryable=False)
        if path.startswith("/mcp/"):
            return await self._served.answer(path.removeprefix("/mcp/"), heard)
        if heard.method == "POST" and path in ("/v1/chat/completions", "/chat/completions"):
            return await self._judged(heard.body)
        if heard.method == "GET" and path in ("/v1/models", "/models"):
            return Told(200, msgspec.json.encode({"object": "list", "data": [_model(name) for name in self._broker.judges]}))
        there = "there are POST /v1/chat/completions, GET /v1/models and POST /mcp/NAME"
        raise JudgeFailed(f"the grader asked for {heard.method[:10]!a} {path[:80]!a}, which is not served; {there}", retryable=False)

    def _note(self, boundary: Boundary, reason: str, *, retryable: bool) -> None:
        self._meter.failed(InfrastructureFailure(boundary=boundary, reason=reason, retryable=retryable))

    async def _judged(self, body: bytes) -> Told:
        request = _request(body)
        name = str(request.get("model", ""))
        judge, terms = self._judge(name)
        spent, began = self._meter.spent(name), time.monotonic()
        try:
            lowered = _within(request, len(body), terms, spent)
        except JudgeFailed:
            self._meter.calls.append(JudgeCall(judge=name, outcome="refused", seconds=0.0, cost_microusd=0))
            raise
        spent.requests += 1
        reply, sent = None, Sent()
        try:
            async with asyncio.timeout(terms.timeout_s - spent.seconds):
                async with self._broker.place():
                    reply = await judge.ask(request, sent)
        except TimeoutError:
            raise JudgeFailed(f"judge {name} took longer than the {terms.timeout_s:g} s of one grading", retryable=True) from None
        finally:
            seconds = time.monotonic() - began
            most = Usage(input=len(body), output=_asked_tokens(request, terms))
            call = _call(name, reply, seconds, _cost(terms.prices, reply, sent, most))
            self._meter.calls.append(call)
            spent.seconds += seconds
            spent.cost_microusd += call.cost_microusd or 0
            spent.tokens += call.tokens_in + call.tokens_out + sent.unknown * len(body)
        if lowered and any(choice.finish_reason == "length" for choice in reply.completion.choices):
            raise JudgeFailed(f"the reply of judge {name} was cut at the {terms.max_tokens} tokens of one grading", retryable=False)
        if request.get("stream") is True:
            return Told(200, as_stream(reply.body), "text/event-stream")
        return Told(200, reply.body)

    def _judge(self, name: str) -> tuple[Judge, Terms]:
        found = self._broker.judges.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self._broker.judges, n=1, cutoff=0.0)
            hint = f"the nearest is {near[0]}" if near else "it was given none"
            raise JudgeFailed(f"the grader asked for model {name[:80]!a}, which it was not given; {hint}", retryable=False)
        return found


def _request(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise JudgeFailed(f"the grader sent a request that is none: {reason_of(error)}", retryable=False) from None


def _within(request: dict[str, Any], size: int, terms: Terms, spent: Spent) -> bool:
    """Holds a request of `size` bytes to what is left; whether its own bound on the reply had to be lowered. Raises JudgeFailed."""
    used: Sequence[tuple[str, float, float | None]] = (
        ("requests", spent.requests, terms.max_requests),
        ("tokens", spent.tokens, terms.max_tokens),
        ("seconds", spent.seconds, terms.timeout_s),
        ("micro-dollars", spent.cost_microusd, terms.max_cost_microusd),
    )
    for what, so_far, most in used:
        if most is not None and so_far >= most:
            raise JudgeFailed(f"one grading may use {most:g} {what} of judge {request['model']}, and has", retryable=False)
    lowered, left = False, terms.max_tokens - spent.tokens
    if size > _BYTES_OF_A_TOKEN * left:
        raise JudgeFailed(
            f"a request of {size} bytes has more than the {left} tokens of judge {request['model']} that are left", retryable=False
        )
    for key in ("max_tokens", "max_completion_tokens"):
        if isinstance(request.get(key), int) and request[key] > left:
            request[key], lowered = left, True
    return lowered


def _asked_tokens(request: Mapping[str, Any], terms: Terms) -> int:
    """The most that the reply can have."""
    named = [request[key] for key in ("max_tokens", "max_completion_tokens") if isinstance(request.get(key), int)]
    replies = request.get("n")
    most: int = min([*named, terms.max_tokens])
    return most * (replies if isinstance(replies, int) and 0 < replies < 1000 else 1)


def _call(judge: str, reply: Reply | None, seconds: float, cost_microusd: int | None) -> JudgeCall:
    usage = None if reply is None else reply.completion.usage
    return JudgeCall(
        judge=judge,
        outcome="failed" if reply is None else "answered",
        seconds=seconds,
        tokens_in=0 if usage is None else usage.prompt_tokens,
        tokens_out=0 if usage is None else usage.completion_tokens,
        cost_microusd=cost_microusd,
    )


def _cost(prices: TokenPrices | None, reply: Reply | None, sent: Sent, most: Usage) -> int | None:
    """What a request cost; each time that it was sent and nobody said what it used is charged `most`: a token has at least one byte."""
    usage = None if reply is None else reply.completion.usage
    if usage is None and not sent.unknown:
        return 0
    if prices is None:
        return None
    known = 0 if usage is None else prices.cost(Usage(input=usage.prompt_tokens, output=usage.completion_tokens))
    unknown = prices.cost(most) if sent.unknown else 0
    return total((known, None if unknown is None else sent.unknown * unknown))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "sandmill"}


def _error(status: int, reason: str) -> Told:
    return Told(status, msgspec.json.encode({"error": {"message": reason, "type": "sandmill", "code": None}}))


__all__ = ["Asker", "Broker", "Heard", "Terms", "Told"]
