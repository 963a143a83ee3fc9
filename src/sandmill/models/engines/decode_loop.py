"""The decode loop's state: which rows are being filled, which are sampling, and what each has sampled. Lives on one thread.

In: requests (row, ids, sampling); out: finished replies. A row's tokens and log-probabilities depend only on the weights, its own
ids and its seed: contexts are cut into chunks by their own length alone, and sampling is counter-based.

A round is one call of the decoder for everything there is to do: the next token of every sampling row, and a chunk of every waiting
context. For a large model a call costs as much for a few tokens as for a hundred.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sandmill.errors import NonFinite
from sandmill.models.decoder import Chunk, Decoder, Ints, round_up, whole_rows
from sandmill.models.hidden import HiddenStates
from sandmill.models.llama_decoder import LlamaDecoder
from sandmill.models.model import Sample, Sampling, StopReason
from sandmill.models.sampling import choose, uniform

CHUNK_SIZES = (8, 24, 64)
"""A context takes the smallest that holds what is left of it. Part of the sampled bits: chunking decides the shapes of attention."""
_ROUND_TOKENS = 1024
"""Columns of waiting contexts in one round, so that a flood of long ones does not starve rows that are sampling."""


@dataclass(eq=False)
class Request:
    """One `sample` call. `finish` is called on the decode thread, once."""

    row: int
    ids: Ints
    sampling: Sampling
    finish: Callable[[Sample], None]
    fresh: bool
    """The row is empty: its context may be shared with siblings."""
    offset: int = 0
    prompt: Prompt | None = None


@dataclass(eq=False)
class Prompt:
    """A first context that several sessions share; computed once, then copied."""

    key: bytes
    followers: list[Request] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    logits_V: torch.Tensor | None = None


class DecodeLoop:
    """Rows of one decoder. `round()` does one bounded piece of work; `idle` says when there is none."""

    def __init__(self, decoder: Decoder, *, rows: int, context_length: int, version: int = 0, hidden: HiddenStates | None = None) -> None:
        self._decoder = decoder
        self._hidden = hidden if isinstance(decoder, LlamaDecoder) else None
        self._context = context_length
        self.version = version
        self._filling: list[Request] = []
        self._joining: list[Request] = []
        self._joined: list[Request] = []
        self._prompts: dict[bytes, Prompt] = {}
        self._kept: dict[int, tuple[int, ...]] = {}
        self._requests: dict[int, Request] = {}
        self._active = np.zeros(rows, bool)
        self._produced, self._limits, self._last, self._stop_set = np.zeros((4, rows), np.int64)
        self._unfed = np.full(rows, -1, np.int64)
        self._seeds, self._counters = np.zeros((2, rows), np.uint64)
        self._temperatures, self._top_ps = np.ones((2, rows), np.float32)
        self._out_ids, self._out_versions = np.zeros((2, rows, context_length + 1), np.int64)
        self._out_logprobs = np.zeros((rows, context_length + 1), np.float64)
        self._stop_sets: dict[frozenset[int], int] = {}
        self._stop_table = np.zeros((0, 0), bool)

    @property
    def idle(self) -> bool:
        return not (self._filling or self._joining or self._joined or self._active.any())

    def open(self, row: int, seed: int) -> None:
        """Gives `row` to a new session."""
        self._decoder.clear(row)
        self._unfed[row] = -1
        self._kept.pop(row, None)
        self._seeds[row] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        self._counters[row] = 0

    def admit(self, request: Request) -> None:
        """Takes a request; its first token may come as early as the next round."""
        row = request.row
        if self._unfed[row] >= 0:
            request.ids = np.concatenate([self._unfed[row : row + 1], request.ids])
            self._unfed[row] = -1
        self._requests[row] = request
        if request.fresh:
            key = request.ids.tobytes()
            prompt = self._prompts.get(key)
            request.prompt = prompt or Prompt(key)
            if prompt is not None and prompt.logits_V is None:
                prompt.followers.append(request)
                return
            if prompt is not None:
                self._joining.append(request)
                return
            self._prompts[key] = request.prompt
        self._filling.append(request)

    def drop(self, row: int) -> None:
        """Ends the session of `row`, whatever it is doing."""
        self._copy_to_joining()  # `row` may be the last that holds what they wait for
        self._active[row] = False
        request = self._requests.pop(row, None)
        if request is not None and request in self._filling:
            self._filling.remove(request)
            if request.prompt is not None:
                self._promote(request.prompt)
        self._joined = [joined for joined in self._joined if joined is not request]
        for prompt in list(self._prompts.values()):
            prompt.followers = [follower for follower in prompt.followers if follower.row != row]
            prompt.rows.discard(row)
            if prompt.logits_V is not None and not prompt.rows:
                del self._prompts[prompt.key]

    def publish(self, version: int) -> None:
        """New weights from the next token on; contexts computed under the old ones are no longer shared with newcomers."""
        self._decoder.refresh()
        if self._hidden is not None:
            self._hidden.clear()
            self._kept.clear()
        self.version = version
        self._prompts.clear()
        again, self._joining, self._joined = [*self._joining, *self._joined], [], []
        for request in again:
            self._decoder.clear(request.row)
            self.admit(request)

    def round(self) -> None:
        """One token for every sampling row, and a chunk of every waiting context that fits."""
        sampling = np.flatnonzero(self._active)
        filling = self._next_to_fill()
        chunks = [Chunk(sampling, self._last[sampling, None], np.ones(len(sampling), np.int64))] if len(sampling) else []
        chunks += [_chunk(requests, size) for size, requests in filling.items()]
        logits: list[torch.Tensor] = []
        of: list[int] = []
        if chunks:
            answer = self._decoder.extend(chunks)
            logits, of = [answer.distinct_DV], answer.of_A.tolist()
        ready = list(zip(sampling.tolist(), of[: len(sampling)], strict=True))
        done = set()
        for request, index in zip(itertools.chain(*filling.values()), of[len(sampling) :], strict=True):
            request.offset += min(_size(request), len(request.ids) - request.offset)
            if request.offset == len(request.ids):
                done.add(id(request))
                ready += [(each.row, index) for each in self._filled(request, logits[0][index])]
        if done:
            self._filling = [request for request in self._filling if id(request) not in done]
        for prompt, requests in self._take_joined().items():
            assert prompt.logits_V is not None
            index = sum(map(len, logits))
            logits.append(prompt.logits_V[None])
            ready += [(request.row, index) for request in requests]
        if ready:
            self._emit(ready, logits[0] if len(logits) == 1 else torch.cat(logits))

    def _copy_to_joining(self) -> None:
        """Copies shared contexts to the rows of those that came when they had been computed."""
        joining: dict[Prompt, list[Request]] = {}
        for request in self._joining:
            assert request.prompt is not None
            joining.setdefault(request.prompt, []).append(request)
        for prompt, requests in joining.items():
            self._copy(prompt, requests, min(prompt.rows))
        self._joined += self._joining
        self._joining = []

    def _take_joined(self) -> dict[Prompt, list[Request]]:
        """Those who sample the first token of a shared context now."""
        self._copy_to_joining()
        joined: dict[Prompt, list[Request]] = {}
        for request in self._joined:
            assert request.prompt is not None
            assert request.prompt.logits_V is not None
            joined.setdefault(request.prompt, []).append(request)
            self._begin(request, len(request.prompt.logits_V), len(request.ids))
        self._joined = []
        return joined

    def _next_to_fill(self) -> dict[int, list[Request]]:
        """Waiting contexts by the size of their next chunk, oldest first."""
        room = _ROUND_TOKENS
        filling: dict[int, list[Request]] = {}
        for request in self._filling:
            room -= _size(request)
            if room < 0:
                break
            filling.setdefault(_size(request), []).append(request)
        return filling

    def _filled(self, request: Request, logits_V: torch.Tensor) -> list[Request]:
        """A context is complete: it samples from now on, and so do those that waited for the same one. Returns all of them."""
        requests = [request]
        prompt = request.prompt
        if prompt is not None:
            prompt.logits_V = logits_V.clone()
            prompt.rows.add(request.row)
            followers, prompt.followers = prompt.followers, []
            self._copy(prompt, followers, request.row)
            requests += followers
        for each in requests:
            self._begin(each, len(logits_V), int(self._decoder.lengths[request.row]))
        return requests

    def _copy(self, prompt: Prompt, requests: list[Request], source: int) -> None:
        """Copies a computed context to its siblings' rows."""
        if requests:
            rows = np.array([request.row for request in requests], np.int64)
            self._decoder.copy(source, rows, len(requests[0].ids))
            prompt.rows.update(rows.tolist())

    def _promote(self, prompt: Prompt) -> None:
        """The leader of a shared context went away half-way: its first follower starts over."""
        if prompt.followers:
            self._filling.append(prompt.followers.pop(0))
        elif self._prompts.get(prompt.key) is prompt:
            del self._prompts[prompt.key]

    def _begin(self, request: Request, vocabulary: int, length: int) -> None:
        row, sampling = request.row, request.sampling
        room = self._context - length
        self._limits[row] = min(sampling.max_new_tokens, room)
        self._produced[row] = 0
        self._temperatures[row] = sampling.temperature
        self._top_ps[row] = sampling.top_p
        self._stop_set[row] = self._stop_index(sampling.stop_ids, vocabulary)
        self._active[row] = True

    def _emit(self, ready: Sequence[tuple[int, int]], logits: torch.Tensor) -> None:
        """Samples one token for each (row, index into `logits`); finishes the rows that stop."""
        rows, indices = np.array(ready, np.int64).T
        used, of_A = np.unique(indices, return_inverse=True)
        size = round_up(len(used), whole_rows(logits.shape[1]))
        if len(logits) < size or used[-1] >= len(used):
            logits = logits[torch.from_numpy(np.pad(used, (0, size - len(used)), mode="edge"))]
        logits = logits[:size]
        pad = round_up(len(rows)) - len(rows)
        with torch.inference_mode():
            tokens_A, logprobs_A = choose(
                logits,
                torch.from_numpy(np.pad(of_A, (0, pad))),
                torch.from_numpy(np.pad(self._temperatures[rows], (0, pad), constant_values=1)),
                torch.from_numpy(np.pad(self._top_ps[rows], (0, pad), constant_values=1)),
                torch.from_numpy(np.pad(uniform(self._seeds[rows], self._counters[rows]), (0, pad))),
            )
        tokens, logprobs = tokens_A.numpy()[: len(rows)], logprobs_A.numpy()[: len(rows)]
        if not np.isfinite(logprobs).all():
            raise NonFinite(f"the model's log-probabilities at policy version {self.version}")
        produced = self._produced[rows]
        self._out_ids[rows, produced] = tokens
        self._out_logprobs[rows, produced] = logprobs
        self._out_versions[rows, produced] = self.version
        self._counters[rows] += np.uint64(1)
        self._produced[rows] = produced + 1
        self._last[rows] = tokens
        stopped = self._stop_table[self._stop_set[rows], tokens]
        done = stopped | (produced + 1 >= self._limits[rows])
        for row, at_stop in zip(rows[done].tolist(), stopped[done].tolist(), strict=True):
            self._finish(row, at_stop)

    def _finish(self, row: int, at_stop: bool) -> None:
        request = self._requests.pop(row)
        count = int(self._produced[row])
        self._active[row] = False
        self._unfed[row] = self._last[row]
        if self._hidden is not None and isinstance(self._decoder, LlamaDecoder):
            # Before the reply is known to anyone: whoever trains on it must find its states, or bits would depend on timing.
            ids, states = self._decoder.lowered(row)
            self._hidden.keep(ids, states, instead_of=self._kept.get(row))
            self._kept[row] = ids
        length = StopReason.LENGTH if count == request.sampling.max_new_tokens else StopReason.CONTEXT
        request.finish(
            Sample(
                token_ids=tuple(self._out_ids[row, :count].tolist()),
                logprobs=tuple(self._out_logprobs[row, :count].tolist()),
                policy_versions=tuple(self._out_versions[row, :count].tolist()),
                stop=StopReason.STOP if at_stop else length,
            )
        )

    def _stop_index(self, stop_ids: frozenset[int], vocabulary: int) -> int:
        index = self._stop_sets.setdefault(stop_ids, len(self._stop_sets))
        if index == len(self._stop_table):
            row = np.zeros((1, vocabulary), bool)
            row[0, [token for token in stop_ids if 0 <= token < vocabulary]] = True
            self._stop_table = np.concatenate([self._stop_table.reshape(-1, vocabulary), row])
        return index


def _size(request: Request) -> int:
    left = len(request.ids) - request.offset
    return next((size for size in CHUNK_SIZES if left <= size), CHUNK_SIZES[-1])


def _chunk(requests: list[Request], size: int) -> Chunk:
    """The next `size` tokens of each, or what is left of them."""
    rows = np.array([request.row for request in requests], np.int64)
    counts = np.array([min(size, len(request.ids) - request.offset) for request in requests], np.int64)
    ids = np.zeros((len(requests), size), np.int64)
    for index, request in enumerate(requests):
        ids[index, : counts[index]] = request.ids[request.offset : request.offset + counts[index]]
    return Chunk(rows, ids, counts)
