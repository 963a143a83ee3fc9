"""Hidden states between sampling and training: what the engine computed below the lowest adapted layer, the trainer need not repeat.

In: sessions' token ids and hidden states after every reply; out: the same by token ids. Layers below the adapter are frozen, so the states
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
        self._states: dict[tuple[int, ...], tuple[torch.Tensor, int]] = {}
        self._lock = threading.Lock()

    def keep(self, ids: tuple[int, ...], states_TD: torch.Tensor, *, instead_of: tuple[int, ...] | None) -> None:
        """Keeps a session's states, one per id that went through the layers (its last sampled token has not), in place of those
        after its reply before. Sessions with the same ids share them."""
        with self._lock:
            _, users = self._states.get(ids, (states_TD, 0))
            self._states[ids] = states_TD, users + 1
            if instead_of in self._states:
                states_TD, users = self._states.pop(instead_of)
                if users > 1:
                    self._states[instead_of] = states_TD, users - 1

    def find(self, ids: Sequence[int]) -> torch.Tensor | None:
        """(len(ids), width): the states of a session that went through the layers with exactly these tokens, or None."""
        with self._lock:
            return self._states.get(tuple(ids), (None, 0))[0]

    def clear(self) -> None:
        """Forgets everything: once per update, when its episodes have been trained on."""
        with self._lock:
            self._states.clear()
