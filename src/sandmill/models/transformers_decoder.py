"""Batched decoding of any causal model through its own transformers forward: slower than the fused path, and general.

Keys and values live in slots as in the fused decoder; every call hands the model a cache put together from them, explicit position
ids and an explicit mask. A model that this does not reproduce (positions of another kind, other state than keys and values) is
noticed when the decoder is made, and is then run one row at a time with a cache object of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sandmill.models.decoder import Chunk, Decoder, Ints, Logits, round_up, zeros_on_demand

_KEY_MULTIPLE = 64
_PROBE_TOLERANCE = 2e-3


def transformers_decoder(model: Any, *, rows: int, context_length: int) -> Decoder:
    """`BatchedDecoder` where it agrees with the model's plain forward, else `RowDecoder`."""
    # Attention as plain products gives a row the same bits in any batch; the fused kernels divide work by batch size.
    model.set_attn_implementation("eager")
    if _reproduces(model):
        return BatchedDecoder(model, rows=rows, context_length=context_length)
    return RowDecoder(model, rows=rows, context_length=context_length)


class BatchedDecoder:
    """Slots of (rows, kv heads, context, head size) per layer, float32."""

    def __init__(self, model: Any, *, rows: int, context_length: int) -> None:
        self._model = model
        self._context = round_up(context_length, _KEY_MULTIPLE)
        self._lengths: Ints = np.zeros(rows, np.int64)
        self._slots: list[tuple[Tensor, Tensor]] = []
        for layer in _plain(model, torch.zeros(1, 1, dtype=torch.long))[1].layers:
            self._slots.append((_slot(rows, self._context, layer.keys), _slot(rows, self._context, layer.values)))

    @property
    def lengths(self) -> Ints:
        return self._lengths

    def refresh(self) -> None:
        """Nothing is kept beside the model's own weights."""

    def copy(self, source: int, targets: Ints, length: int) -> None:
        index = torch.from_numpy(targets)
        for keys, values in self._slots:
            keys[index, :, :length] = keys[source, :, :length]
            values[index, :, :length] = values[source, :, :length]
        self._lengths[targets] = length

    def clear(self, row: int) -> None:
        self._lengths[row] = 0

    @torch.no_grad()
    def extend(self, chunks: Sequence[Chunk]) -> Logits:
        return _stacked([row for chunk in chunks for row in self._extend(chunk)])

    def _extend(self, chunk: Chunk) -> Tensor:
        rows_A, ids_AC, counts_A = chunk
        columns = ids_AC.shape[1]
        starts_A = self._lengths[rows_A]
        # Never none: torch multiplies very small matrices by another kernel, whose last bits differ.
        past = round_up(max(1, int(starts_A.max())), _KEY_MULTIPLE)
        pad = round_up(len(rows_A)) - len(rows_A)
        rows = torch.from_numpy(np.pad(rows_A, (0, pad), mode="edge"))
        starts = torch.from_numpy(np.pad(starts_A, (0, pad), mode="edge"))
        ids = torch.from_numpy(np.pad(ids_AC, ((0, pad), (0, 0)), mode="edge"))
        cache = _cache(self._model)
        for index, (keys, values) in enumerate(self._slots):
            cache.update(keys[:, :, :past].index_select(0, rows), values[:, :, :past].index_select(0, rows), index)
        logits, cache = _forward(
            self._model,
            cache,
            input_ids=ids,
            attention_mask=_mask(starts, past, columns),
            position_ids=(starts[:, None] + torch.arange(columns)).clamp_max(self._context - 1),
        )
        self._keep(cache, rows_A, starts_A, counts_A, past)
        self._lengths[rows_A] += counts_A
        return logits[torch.arange(len(rows_A)), torch.from_numpy(counts_A - 1)].float()

    def _keep(self, cache: Any, rows_A: Ints, starts_A: Ints, counts_A: Ints, past: int) -> None:
        taken, column = np.nonzero(np.arange(int(counts_A.max())) < counts_A[:, None])
        rows, positions = torch.from_numpy(rows_A[taken]), torch.from_numpy(starts_A[taken] + column)
        source, place = torch.from_numpy(taken), torch.from_numpy(column + past)
        for (keys, values), layer in zip(self._slots, cache.layers, strict=True):
            keys[rows, :, positions] = layer.keys[source, :, place]
            values[rows, :, positions] = layer.values[source, :, place]


class RowDecoder:
    """One forward per row, with the model's own cache object."""

    def __init__(self, model: Any, *, rows: int, context_length: int) -> None:
        self._model = model
        self._lengths: Ints = np.zeros(rows, np.int64)
        self._caches: list[Any] = [None] * rows
        self._chunks: list[list[Ints]] = [[] for _ in range(rows)]

    @property
    def lengths(self) -> Ints:
        return self._lengths

    def refresh(self) -> None:
        """Nothing is kept beside the model's own weights."""

    @torch.no_grad()
    def copy(self, source: int, targets: Ints, length: int) -> None:
        """Replays the source's first chunks: state other than keys and values cannot be cut back to an earlier length."""
        for target in targets.tolist():
            self.clear(target)
        done = 0
        for chunk in list(self._chunks[source]):
            if done == length:
                break
            self._advance(int(targets[0]), chunk)
            done += len(chunk)
        for target in targets[1:].tolist():
            self._caches[target] = copy.deepcopy(self._caches[targets[0]])
            self._chunks[target] = list(self._chunks[targets[0]])
        self._lengths[targets] = length

    def clear(self, row: int) -> None:
        self._caches[row] = None
        self._chunks[row] = []
        self._lengths[row] = 0

    @torch.no_grad()
    def extend(self, chunks: Sequence[Chunk]) -> Logits:
        logits = []
        for rows_A, ids_AC, counts_A in chunks:
            for row, ids, count in zip(rows_A.tolist(), ids_AC, counts_A.tolist(), strict=True):
                logits.append(self._advance(row, ids[:count]))
            self._lengths[rows_A] += counts_A
        return _stacked(logits)

    def _advance(self, row: int, ids: Ints) -> Tensor:
        logits, self._caches[row] = _forward(self._model, self._caches[row], input_ids=torch.from_numpy(ids[None]))
        self._chunks[row].append(ids)
        return logits[0, -1].float()


def _stacked(logits: list[Tensor]) -> Logits:
    """Padded: element-wise work on it has no vector remainder."""
    padding = [logits[0]] * (round_up(len(logits)) - len(logits))
    return Logits(torch.stack(logits + padding), np.arange(len(logits)))


def _plain(model: Any, ids_BT: Tensor) -> tuple[Tensor, Any]:
    with torch.no_grad():
        return _forward(model, None, input_ids=ids_BT)


def _forward(model: Any, cache: Any, **inputs: Tensor) -> tuple[Tensor, Any]:
    """Logits and cache. The cache's argument has two names among the transformers versions in use."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model(**inputs, **{name: cache}, use_cache=True)
    return output.logits, output[name]


def _cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _slot(rows: int, context: int, like: Tensor) -> Tensor:
    return zeros_on_demand(rows, like.shape[1], context, like.shape[3])


def _mask(starts: Tensor, past: int, columns: int) -> Tensor:
    """float (A, 1, C, past + C): a query sees its row's `start` cached keys and the new ones up to itself."""
    cached = (torch.arange(past) < starts[:, None])[:, None, None, :].expand(-1, 1, columns, -1)
    fresh = torch.ones(columns, columns, dtype=torch.bool).tril().expand(len(starts), 1, -1, -1)
    visible = torch.cat([cached, fresh], -1)
    return torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)


def _reproduces(model: Any) -> bool:
    """Decodes two rows of different lengths in steps and compares with the plain forward."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.config, "sliding_window", None) is not None:
        return False
    first, second = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 5))
    try:
        decoder = BatchedDecoder(model, rows=2, context_length=8)
        decoder.extend([Chunk(np.array([0]), first[None, :3], np.array([3]))])
        got = decoder.extend([Chunk(np.array([0, 1]), np.stack([first[3:5], second[:2]]), np.array([2, 1]))])
        for logits, ids in zip(got.distinct_DV[got.of_A], (first, second[:1]), strict=True):
            wanted = _plain(model, torch.from_numpy(ids[None]))[0][0, -1].float()
            if float((logits - wanted).abs().max()) > _PROBE_TOLERANCE * max(1.0, float(wanted.abs().max())):
                return False
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return False
    return True
