"""The trainable side of a model: differentiable log-probabilities of given tokens under the current weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class Scored(NamedTuple):
    """`logprobs_K`, `entropies_K`: one entry per selected position, in row-major order of the selection (float32, nats)."""

    logprobs_K: torch.Tensor
    entropies_K: torch.Tensor


class Policy(Protocol):
    """Weights with a LoRA adapter. Axis letters: B rows, T positions, N packed positions, K selected positions."""

    def score(self, ids_BT: torch.Tensor, lengths_B: torch.Tensor, select_BT: torch.Tensor, temperature: float) -> Scored:
        """Padded layout. `select_BT[b, t]` asks for log p(ids[b, t] | ids[b, :t]); never true at t == 0 or past the row's length."""
        ...

    def score_packed(self, ids_N: torch.Tensor, starts: tuple[int, ...], select_N: torch.Tensor, temperature: float) -> Scored:
        """Packed layout: rows are laid end to end, row i begins at `starts[i]`; no position sees another row."""
        ...

    def trainable(self) -> Mapping[str, torch.nn.Parameter]:
        """Adapter parameters by their peft name, in a fixed order."""
        ...

    def save_adapter(self, folder: Path) -> None:
        """Writes adapter_config.json and adapter_model.safetensors as plain peft reads them."""
        ...


@runtime_checkable
class SharesPrefixes(Protocol):
    """A policy that computes what several rows have in common only once; the gradient is the sum over the rows all the same."""

    def score_tree(
        self, ids_N: torch.Tensor, paths_BT: torch.Tensor, lengths_B: torch.Tensor, select_BT: torch.Tensor, temperature: float
    ) -> Scored:
        """Tree layout: row b is the tokens `ids_N[paths_BT[b, :lengths_B[b]]]`, with any valid index as filler behind.

        A token on several paths has the same tokens before it on each. `select_BT` as in `Policy.score`.
        """
        ...
