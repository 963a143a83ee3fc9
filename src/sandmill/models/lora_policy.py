"""A LoRA adapter over frozen weights as a `Policy`: peft owns the parameters and the files, the arithmetic is ours where it can be.

In: a loaded model and the adapter's settings; out: differentiable log-probabilities, and files that plain peft reads.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sandmill.config.manifest import LoraSection
from sandmill.errors import CheckpointCorrupt, ConfigError
from sandmill.models import llama
from sandmill.models.hidden import HiddenStates
from sandmill.models.llama_forward import Layout, Stack, run_layers, score_hidden
from sandmill.models.loading import LoadedModel, first_line, quiet_transformers, unreadable
from sandmill.models.policy import Scored

_MERGE_WIDTH = 256
"""Up to this width one product with the merged matrix is cheaper than the two thin ones of the adapter."""


class LoraPolicy:
    """See `Policy`. Wraps `loaded.model` in place: an engine over the same model sees the adapter at its next `publish`.

    A fresh adapter changes nothing (its `B` is zero); `seed` draws its `A`. Raises ConfigError for modules the model lacks.
    """

    def __init__(self, loaded: LoadedModel, lora: LoraSection, *, seed: int) -> None:
        self.loaded = loaded
        self._model = loaded.model
        self._peft = _wrap(loaded.model, lora, seed)
        self._dropout = lora.dropout
        self._fused = llama.is_supported(self._model)
        self._training = True
        lowest = min(llama.adapted_indices(self._model), default=0) if self._fused else 0
        self.hidden_states = HiddenStates(lowest) if lowest else None
        """Give it to the engine, and what its sessions computed below the adapter is not computed again. None: nothing lies below."""

    def trainable(self) -> Mapping[str, torch.nn.Parameter]:
        """See `Policy.trainable`."""
        return {name: parameter for name, parameter in self._peft.named_parameters() if parameter.requires_grad}

    def score(self, ids_BT: Tensor, lengths_B: Tensor, select_BT: Tensor, temperature: float) -> Scored:
        """See `Policy.score`. Deterministic except for adapter dropout, which draws from torch's global generator."""
        rows, columns = ids_BT.shape
        _check_selection(ids_BT, lengths_B, select_BT)
        if not self._fused:
            return self._score_generic(ids_BT, lengths_B, select_BT, temperature)
        chosen = select_BT.flatten().nonzero()[:, 0]
        ids_N = ids_BT.flatten()
        return self._score(ids_N, Layout.padded(rows, columns), lengths_B - 1, chosen - 1, ids_N[chosen], temperature)

    def score_packed(self, ids_N: Tensor, starts: tuple[int, ...], select_N: Tensor, temperature: float) -> Scored:
        """See `Policy.score_packed`."""
        layout = Layout.packed(len(ids_N), starts)
        lengths_B = torch.diff(torch.tensor(starts), append=torch.tensor([len(ids_N)]))
        if bool(select_N[torch.tensor(starts)].any()):
            raise ValueError("the first token of a row has no log-probability: nothing comes before it")
        if not self._fused:
            assert layout.slots is not None
            inside = torch.arange(layout.columns) < lengths_B[:, None]
            return self._score_generic(ids_N[layout.slots], lengths_B, select_N[layout.slots] & inside, temperature)
        chosen = select_N.nonzero()[:, 0]
        return self._score(ids_N, layout, lengths_B - 1, chosen - 1, ids_N[chosen], temperature)

    def score_tree(self, ids_N: Tensor, paths_BT: Tensor, lengths_B: Tensor, select_BT: Tensor, temperature: float) -> Scored:
        """See `SharesPrefixes.score_tree`."""
        _check_selection(paths_BT, lengths_B, select_BT)
        if not self._fused:
            return self._score_generic(ids_N[paths_BT], lengths_B, select_BT, temperature)
        targets_K = ids_N[paths_BT[select_BT]]
        # What nothing follows need not be computed: the rows' last tokens, where they are not inside another row.
        before_BT, lengths_B = paths_BT[:, :-1], lengths_B - 1
        needed_N = torch.zeros(len(ids_N), dtype=torch.bool)
        needed_N[before_BT[torch.arange(before_BT.shape[1]) < lengths_B[:, None]]] = True
        before_BT = (needed_N.cumsum(0) - 1).clamp_min(0)[before_BT]
        ids_N = ids_N[needed_N]
        layout = Layout.tree(len(ids_N), before_BT, lengths_B)
        return self._score(ids_N, layout, lengths_B, before_BT[select_BT[:, 1:]], targets_K, temperature)

    def save_adapter(self, folder: Path) -> None:
        """See `Policy.save_adapter`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._peft.save_pretrained(str(folder), save_embedding_layers=False)

    def load_adapter(self, folder: Path) -> None:
        """Restores the adapter saved there, bit for bit. Raises CheckpointCorrupt when it does not fit or cannot be read."""
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        path = folder / "adapter_model.safetensors"
        try:
            state = load_file(path)
        except unreadable() as error:
            raise CheckpointCorrupt(
                f"the adapter {path} cannot be read ({first_line(error)}); resume from an earlier checkpoint"
            ) from error
        mine = {name: tensor.shape for name, tensor in get_peft_model_state_dict(self._peft).items()}
        if {name: tensor.shape for name, tensor in state.items()} != mine:
            raise CheckpointCorrupt(f"the adapter {path} does not fit this run's LoRA settings; resume with the manifest it was trained by")
        set_peft_model_state_dict(self._peft, state)

    def train(self, on: bool = True) -> None:
        """Switches adapter dropout; evaluation of log-probabilities wants it off."""
        self._training = on

    def _score(self, ids_N: Tensor, layout: Layout, lengths_B: Tensor, before_K: Tensor, targets_K: Tensor, temperature: float) -> Scored:
        """log p of `targets_K`, each after the token `before_K` of `ids_N`. Nothing is asked after a row's first `lengths_B` tokens."""
        stack, split = self._stack(layout.columns)
        contexts_C, of_K = torch.unique(before_K, return_inverse=True)
        with torch.no_grad():
            known = self._sampled(ids_N, layout, lengths_B)
            x = functional.embedding(ids_N, llama.embedding(self._model)) if known is None else known
            x = run_layers(stack, x, layout, 0 if known is None else split, split)
        x = run_layers(stack, x, layout, split, stack.shape.layers)
        return Scored(*score_hidden(stack, x[contexts_C], of_K, targets_K, temperature))

    def _sampled(self, ids_N: Tensor, layout: Layout, lengths_B: Tensor) -> Tensor | None:
        """(N, width) the states that the engine kept at the lowest adapted layer for each row's first tokens, or None where it lacks
        a row. Others are zero: nothing that is asked looks at them."""
        if self.hidden_states is None:
            return None
        slots_BT = torch.arange(layout.rows * layout.columns).view(layout.rows, -1) if layout.slots is None else layout.slots
        x = torch.zeros(len(ids_N), llama.shape_of(self._model).width)
        for slots, length in zip(slots_BT, lengths_B.tolist(), strict=True):
            states = self.hidden_states.find(ids_N[slots[:length]].tolist())
            if states is None:
                return None
            x[slots[:length]] = states
        return x

    def _stack(self, columns: int) -> tuple[Stack, int]:
        """The layers with their adapters, and the index of the lowest adapted one: nothing below it needs a gradient."""
        shape = llama.shape_of(self._model)
        layers = list(llama.frozen_layers(self._model))
        adapted = llama.adapted_indices(self._model)
        for index in adapted:
            layers[index] = llama.adapted_layer(self._model, index, shape, layers[index])
        stack = Stack(
            shape=shape,
            layers=layers,
            norm=llama.final_norm(self._model).detach(),
            head=llama.head(self._model),  # frozen, and the very tensor: it is laid out for its products once
            rotations_TP=llama.rotations(self._model, columns),
            merge=shape.width <= _MERGE_WIDTH,
            dropout=self._dropout if self._training else 0.0,
        )
        return stack, min(adapted, default=shape.layers)

    def _score_generic(self, ids_BT: Tensor, lengths_B: Tensor, select_BT: Tensor, temperature: float) -> Scored:
        """Through the model's own forward."""
        self._peft.train(self._training and self._dropout > 0)
        mask = (torch.arange(ids_BT.shape[1]) < lengths_B[:, None]).long()
        logits_BTV = self._peft(input_ids=ids_BT, attention_mask=mask, use_cache=False).logits
        self._peft.eval()
        logprobs_KV = functional.log_softmax(logits_BTV[:, :-1][select_BT[:, 1:]].float() / temperature, -1)
        entropies_K = -(logprobs_KV.exp() * logprobs_KV).sum(-1)
        return Scored(logprobs_KV.gather(1, ids_BT[select_BT][:, None])[:, 0], entropies_K)


def check_adapter(model: Any, lora: LoraSection) -> None:
    """Raises ConfigError for an adapter that this model cannot carry; costs nothing."""
    layers = int(model.config.num_hidden_layers)
    if lora.top_layers is not None and lora.top_layers > layers:
        raise ConfigError(f"topLayers is {lora.top_layers}, but the model has {layers} layers", field="spec.parameters.lora.topLayers")
    modules = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    for wanted in lora.target_modules:
        if wanted not in modules:
            near = difflib.get_close_matches(wanted, modules, n=1, cutoff=0.0)
            raise ConfigError(f"the model has no module {wanted!r}; the nearest is {near[0]!r}", field="spec.parameters.lora.targetModules")


def _wrap(model: Any, lora: LoraSection, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    check_adapter(model, lora)
    layers = int(model.config.num_hidden_layers)
    top = layers if lora.top_layers is None else lora.top_layers
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        layers_to_transform=None if top == layers else list(range(layers - top, layers)),
        bias="none",
        task_type="CAUSAL_LM",
    )
    if hasattr(model, "peft_config"):
        raise ConfigError("this model already carries an adapter; load it again before giving it another")
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config).eval()
        except ValueError as error:
            raise ConfigError(f"the adapter does not fit the model: {first_line(error)}", field="spec.parameters.lora") from error


def _check_selection(ids_BT: Tensor, lengths_B: Tensor, select_BT: Tensor) -> None:
    inside = torch.arange(ids_BT.shape[1]) < lengths_B[:, None]
    if bool(select_BT[:, 0].any()) or bool((select_BT & ~inside).any()):
        raise ValueError("a selected position must come after a row's first token and before its end")
