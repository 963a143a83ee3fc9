"""Supervised steps on scripted demonstrations before reinforcement learning. In: a model and demonstrations; out: the model, taught.

Small models learn with all their parameters, larger ones through the adapter of the policy. The same arguments give the same bits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from sandmill.environments.demonstration import Demonstration
from sandmill.errors import ConfigError, NonFinite
from sandmill.models import llama
from sandmill.models.line_dialogue import LineDialogue
from sandmill.models.llama_forward import Layout, Stack, run_layers
from sandmill.models.loading import LoadedModel
from sandmill.models.lora_policy import LoraPolicy

FULL_PARAMETERS_LIMIT = 10_000_000
"""Above this many parameters only the adapter is trained."""

_POOL_BATCHES = 16
_WARMUP_STEPS = 50


class WarmStartProgress(msgspec.Struct, frozen=True, kw_only=True):
    """After `step` of `steps` steps; `loss` is the weighted mean cross-entropy in nats of that step's batch."""

    step: int
    steps: int
    loss: float


def warm_start(
    loaded: LoadedModel,
    demonstrations: Iterator[Demonstration],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    policy: LoraPolicy | None = None,
    progress: Callable[[WarmStartProgress], None] | None = None,
) -> None:
    """AdamW (0.9, 0.98), weight decay 0.01, 50 steps of warm-up, then linear decay to a tenth; gradient norm clipped at 1.

    Raises ConfigError where a large model comes without a policy or the demonstrations run out, NonFinite where the loss does.
    """
    full = loaded.parameter_count <= FULL_PARAMETERS_LIMIT
    if not full and policy is None:
        raise ConfigError(f"{loaded.name} is too large to train all its parameters; give warm_start the policy whose adapter it may train")
    parameters = _trainable(loaded, None if full else policy)
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    batches = _batches(loaded, demonstrations, batch_size, seed)
    for step in range(steps):
        ids_BT, weights_BT = next(batches)
        loss = _loss(loaded, None if full else policy, ids_BT, weights_BT)
        if not bool(torch.isfinite(loss)):
            raise NonFinite(f"the loss of warm-start step {step + 1}")
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / _WARMUP_STEPS) * (1 - 0.9 * step / steps)
        optimizer.step()
        if progress is not None:
            progress(WarmStartProgress(step=step + 1, steps=steps, loss=float(loss.detach())))
    for parameter in parameters:
        parameter.grad = None
    for parameter in frozen:
        parameter.requires_grad_(False)


def _trainable(loaded: LoadedModel, policy: LoraPolicy | None) -> list[torch.nn.Parameter]:
    if policy is not None:
        return list(policy.trainable().values())
    return [parameter for name, parameter in loaded.model.named_parameters() if "lora_" not in name]


def _batches(loaded: LoadedModel, demonstrations: Iterator[Demonstration], batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of similar length, in random order: a pool of 16 batches is drawn, sorted and cut."""
    order = random.Random(seed)
    dialogue = LineDialogue(loaded.tokenizer, context_length=loaded.context_length)
    while True:
        pool = [
            dialogue.encode_segments(demonstration.segments)
            for demonstration in itertools.islice(demonstrations, batch_size * _POOL_BATCHES)
        ]
        if len(pool) < batch_size:
            raise ConfigError(f"the demonstrations ran out: a batch needs {batch_size}, {len(pool)} were left")
        pool.sort(key=lambda encoded: len(encoded[0]))
        cut = [pool[start : start + batch_size] for start in range(0, len(pool) - batch_size + 1, batch_size)]
        order.shuffle(cut)
        for batch in cut:
            yield _tensors(batch, loaded.context_length)


def _tensors(batch: Sequence[tuple[list[int], list[float]]], context_length: int) -> tuple[Tensor, Tensor]:
    columns = min(context_length, max(len(ids) for ids, _ in batch))
    ids_BT = torch.zeros(len(batch), columns, dtype=torch.long)
    weights_BT = torch.zeros(len(batch), columns)
    for row, (ids, weights) in enumerate(batch):
        length = min(columns, len(ids))
        ids_BT[row, :length] = torch.tensor(ids[:length])
        weights_BT[row, :length] = torch.tensor(weights[:length])
    return ids_BT, weights_BT


def _loss(loaded: LoadedModel, policy: LoraPolicy | None, ids_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Weighted mean of -log p over positions 1 and later; through an adapter only what the agent writes is asked for."""
    if policy is not None:
        select_BT = weights_BT >= 1
        select_BT[:, 0] = False
        lengths_B = (weights_BT > 0).long().cumsum(1).argmax(1) + 1
        return -policy.score(ids_BT, lengths_B, select_BT, 1.0).logprobs_K.mean()
    logits_NV = _logits(loaded.model, ids_BT[:, :-1])
    losses_N = functional.cross_entropy(logits_NV, ids_BT[:, 1:].flatten(), reduction="none")
    weights_N = weights_BT[:, 1:].flatten()
    return (losses_N * weights_N).sum() / weights_N.sum()


def _logits(model: Any, ids_BT: Tensor) -> Tensor:
    """(B x T, vocabulary), differentiable in all base parameters."""
    if not llama.is_supported(model):
        logits: Tensor = model(input_ids=ids_BT, use_cache=False).logits
        return logits.flatten(0, 1)
    shape = llama.shape_of(model)
    stack = Stack(
        shape=shape,
        layers=[llama.base_layer(model, index, shape) for index in range(shape.layers)],
        norm=llama.final_norm(model),
        head=llama.head(model),
        rotations_TP=llama.rotations(model, ids_BT.shape[1]),
        merge=True,
    )
    x = run_layers(stack, functional.embedding(ids_BT.flatten(), llama.embedding(model)), Layout.padded(*ids_BT.shape), 0, shape.layers)
    return functional.linear(functional.rms_norm(x, (shape.width,), stack.norm, shape.eps), stack.head)
