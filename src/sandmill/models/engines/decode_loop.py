"""The decode loop's state: which rows are being filled, which are sampling, and what each has sampled. Lives on one thread.

In: requests (row, ids, sampling); out: finished replies. A row's tokens and log-probabilities depend only on the weights, its own
ids and its seed: contexts are cut into chunks by their own length alone, and sampling is counter-based.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sandmill.errors import NonFinite
from sandmill.models.decoder import Decoder, Ints
from sandmill.models.hidden import HiddenStates
from sandmill.models.llama_decoder import LlamaDecoder
from sandmill.models.model import Sample, Sampling, StopReason
from sandmill.models.sampling import choose, uniform

LONG_CHUNK, SHORT_CHUNK = 64, 8
_LONG_FROM = 25
"""A context with at least this many tokens left takes a long chunk. Part of the sampled bits: chunking decides the matrix shapes."""
_LONG_ROWS = 16
_PREFILL_ROUNDS = 4
"""Chunks computed between two decode steps, so that long contexts do not starve rows that are sampling."""


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
        return not self._filling and not self._active.any()

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
                self._share(prompt, [request])
                return
            self._prompts[key] = request.prompt
        self._filling.append(request)

    def drop(self, row: int) -> None:
        """Ends the session of `row`, whatever it is doing."""
        self._active[row] = False
        request = self._requests.pop(row, None)
        if request is not None and request in self._filling:
            self._filling.remove(request)
            if request.prompt is not None:
                self._promote(request.prompt)
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

    def round(self) -> None:
        """Up to a few chunks of waiting contexts, then one token for every sampling row."""
        for _ in range(_PREFILL_ROUNDS):
            if not self._filling:
                break
            self._fill()
        rows = np.flatnonzero(self._active)
        if len(rows):
            logits = self._decoder.extend(rows, self._last[rows, None], np.ones(len(rows), np.int64))
            self._emit(rows, logits)

    def _fill(self) -> None:
        """One chunk for as many waiting contexts as take the same chunk size."""
        size = _chunk(self._filling[0])
        batch = [request for request in self._filling if _chunk(request) == size]
        batch = batch[:_LONG_ROWS] if size == LONG_CHUNK else batch
        rows = np.array([request.row for request in batch], np.int64)
        counts = np.array([min(size, len(request.ids) - request.offset) for request in batch], np.int64)
        ids = np.zeros((len(batch), size), np.int64)
        for index, request in enumerate(batch):
            ids[index, : counts[index]] = request.ids[request.offset : request.offset + counts[index]]
        logits = self._decoder.extend(rows, ids, counts)
        for request, count in zip(batch, counts.tolist(), strict=True):
            request.offset += count
        done = [index for index, request in enumerate(batch) if request.offset == len(request.ids)]
        if done:
            finished = [batch[index] for index in done]
            waiting = {id(request) for request in finished}
            self._filling = [request for request in self._filling if id(request) not in waiting]
            self._filled(finished, logits, done)

    def _filled(self, finished: list[Request], logits: torch.Tensor, indices: list[int]) -> None:
        picked = logits[torch.tensor(_padded(indices, logits.shape[0]))]
        for request, index in zip(finished, indices, strict=True):
            if request.prompt is not None:
                request.prompt.logits_V = logits[index].clone()
                request.prompt.rows.add(request.row)
        self._begin(finished, picked)
        for request in finished:
            if request.prompt is not None and request.prompt.followers:
                followers, request.prompt.followers = request.prompt.followers, []
                self._share(request.prompt, followers, source=request.row)

    def _share(self, prompt: Prompt, requests: list[Request], source: int | None = None) -> None:
        """Copies a computed context to its siblings' rows and samples their first tokens."""
        assert prompt.logits_V is not None
        rows = np.array([request.row for request in requests], np.int64)
        self._decoder.copy(min(prompt.rows) if source is None else source, rows, len(requests[0].ids))
        prompt.rows.update(rows.tolist())
        self._begin(requests, prompt.logits_V.expand(-(-len(rows) // 16) * 16, -1))

    def _promote(self, prompt: Prompt) -> None:
        """The leader of a shared context went away half-way: its first follower starts over."""
        if prompt.followers:
            self._filling.append(prompt.followers.pop(0))
        elif self._prompts.get(prompt.key) is prompt:
            del self._prompts[prompt.key]

    def _begin(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        for request in requests:
            row, sampling = request.row, request.sampling
            room = self._context - int(self._decoder.lengths[row])
            self._limits[row] = min(sampling.max_new_tokens, room)
            self._produced[row] = 0
            self._temperatures[row] = sampling.temperature
            self._top_ps[row] = sampling.top_p
            self._stop_set[row] = self._stop_index(sampling.stop_ids, logits.shape[1])
            self._active[row] = True
        self._emit(np.array([request.row for request in requests], np.int64), logits)

    def _emit(self, rows: Ints, logits: torch.Tensor) -> None:
        """Samples one token for each of `rows` from the first logits; finishes the rows that stop."""
        pad = logits.shape[0] - len(rows)
        with torch.inference_mode():
            tokens_A, logprobs_A = choose(
                logits,
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


def _chunk(request: Request) -> int:
    return LONG_CHUNK if len(request.ids) - request.offset >= _LONG_FROM else SHORT_CHUNK


def _padded(indices: list[int], available: int) -> list[int]:
    """Indices repeated to a multiple of 16, so that element-wise work has no vector remainder."""
    return indices + [indices[0]] * (-len(indices) % 16) if available else indices
