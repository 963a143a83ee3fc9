"""Hidden states between sampling and training: what the engine computed below the lowest adapted layer, the trainer need not repeat.

In: finished sessions' token ids and hidden states; out: the same by token ids. Layers below the adapter are frozen, so the states
stay right whatever is published in between.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch


class HiddenStates:
    """States at the input of layer `split`, by session. Safe between the decode thread and the trainer."""

    def __init__(self, split: int) -> None:
        self.split = split
        self._states: dict[tuple[int, ...], torch.Tensor] = {}
        self._lock = threading.Lock()

    def keep(self, ids: Sequence[int], states_TD: torch.Tensor) -> None:
        """Keeps a session's states, one per id that went through the layers (its last sampled token has not)."""
        with self._lock:
            self._states[tuple(ids)] = states_TD

    def find(self, ids: Sequence[int]) -> torch.Tensor | None:
        """(len(ids) - 1, width): the states of all but the last of an episode's tokens, or None."""
        with self._lock:
            return self._states.get(tuple(ids[:-1]))

    def clear(self) -> None:
        """Forgets everything: once per update, when its episodes have been trained on."""
        with self._lock:
            self._states.clear()
