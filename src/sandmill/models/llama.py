"""Weights of a Llama-family model as fused matrices. In: a transformers model, adapted by peft or not; out: per layer four linear maps.

Covers Llama, Mistral without a sliding window, Qwen2 (biases) and Qwen3 (q/k norms), grouped-query attention, tied or untied
embeddings, any static rotary scaling. Fusing leaves the function unchanged:

* q, k and v are one matrix, gate and up another;
* RMSNorm weights are multiplied into the matrix that follows, the 1/sqrt(head_dim) of attention into q;
* the rotary pairs (i, i + D/2) are made adjacent in q and k, so that rotation is one complex product.

A LoRA delta of a fused matrix is `up @ down` with `up` block-diagonal over the fused parts (arXiv:2106.09685, eq. 3).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a model: `heads` query heads and `kv_heads` key/value heads of `head_dim` numbers each."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    eps: float
    qk_norm: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class FusedLinear(NamedTuple):
    """y = x @ (weight + up @ down)^T + bias. `up` and `down` are None where no adapter applies."""

    weight: Tensor
    bias: Tensor | None
    up: Tensor | None
    down: Tensor | None

    def merged(self) -> Tensor:
        """The effective matrix; differentiable in `up` and `down`."""
        if self.up is None or self.down is None:
            return self.weight
        return torch.addmm(self.weight, self.up, self.down)


class FusedLayer(NamedTuple):
    """One block. `q_norm`, `k_norm` are per-head RMSNorm weights (Qwen3) or None."""

    qkv: FusedLinear
    out: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None


def is_supported(model: Any) -> bool:
    """Whether the fused forward computes exactly this model; the generic decoder serves any other."""
    config = model.config
    if config.model_type not in _MODEL_TYPES or getattr(config, "hidden_act", None) != "silu":
        return False
    windows = config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rotary = getattr(model.model, "rotary_emb", None)
    if windows or kinds != {"full_attention"} or rotary is None:
        return False
    if getattr(rotary, "rope_type", "default") in ("dynamic", "longrope"):
        return False
    return 2 * int(rotary.inv_freq.numel()) == shape_of(model).head_dim and _adapter_is_plain(model)


def shape_of(model: Any) -> LlamaShape:
    """Reads the sizes from the model's configuration."""
    config = model.config
    return LlamaShape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        eps=config.rms_norm_eps,
        qk_norm=hasattr(model.model.layers[0].self_attn, "q_norm"),
    )


def rotations(model: Any, length: int) -> Tensor:
    """complex (length, head_dim / 2): the rotary factor of each position, from the model's own frequencies and scaling.

    As in transformers the angles are float32 whatever the weights are.
    """
    rotary = model.model.rotary_emb
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rotary.inv_freq.detach().float())
    factors = torch.polar(torch.full_like(angles, float(getattr(rotary, "attention_scaling", 1.0))), angles)
    return factors.to(torch.complex128) if embedding(model).dtype is torch.float64 else factors


def embedding(model: Any) -> Tensor:
    """(vocabulary, width)."""
    weight: Tensor = model.model.embed_tokens.weight
    return weight


def head(model: Any) -> Tensor:
    """(vocabulary, width); the embedding itself where they are tied."""
    module = model.lm_head
    weight: Tensor = module.weight
    return weight


def final_norm(model: Any) -> Tensor:
    weight: Tensor = model.model.norm.weight
    return weight


_frozen: weakref.WeakKeyDictionary[Any, tuple[int, list[FusedLayer]]] = weakref.WeakKeyDictionary()
_frozen_lock = threading.Lock()


def frozen_layers(model: Any) -> list[FusedLayer]:
    """Every layer's base matrices, detached, without adapters; one copy for all users of a model until its base weights change."""
    with _frozen_lock:
        version = _base_version(model)
        known = _frozen.get(model)
        if known is None or known[0] != version:
            shape = shape_of(model)
            with torch.no_grad():
                known = version, [base_layer(model, index, shape) for index in range(shape.layers)]
            _frozen[model] = known
        return known[1]


def base_layer(model: Any, index: int, shape: LlamaShape) -> FusedLayer:
    """A layer's base matrices without adapters, differentiable where the parameters are."""
    block = model.model.layers[index]
    attention, mlp = block.self_attn, block.mlp
    before, after = block.input_layernorm.weight, block.post_attention_layernorm.weight
    scale = shape.head_dim**-0.5
    q_scale = 1.0 if shape.qk_norm else scale
    q, k, v, o, gate, up, down = (_base(module) for module in _modules(attention, mlp))
    qkv = torch.cat([_paired(q.weight, shape) * q_scale, _paired(k.weight, shape), v.weight]) * before
    bias = None
    if q.bias is not None:
        bias = torch.cat([_paired(q.bias, shape) * q_scale, _paired(k.bias, shape), v.bias])
    return FusedLayer(
        qkv=FusedLinear(qkv, bias, None, None),
        out=FusedLinear(o.weight, o.bias, None, None),
        gate_up=FusedLinear(
            torch.cat([gate.weight, up.weight]) * after, None if gate.bias is None else torch.cat([gate.bias, up.bias]), None, None
        ),
        down=FusedLinear(down.weight, down.bias, None, None),
        q_norm=_paired(attention.q_norm.weight, shape) * scale if shape.qk_norm else None,
        k_norm=_paired(attention.k_norm.weight, shape) if shape.qk_norm else None,
    )


def adapted_layer(model: Any, index: int, shape: LlamaShape, base: FusedLayer) -> FusedLayer:
    """`base` with the deltas of the peft adapter named `default`, differentiable in its parameters."""
    block = model.model.layers[index]
    q, k, v, o, gate, up, down = _modules(block.self_attn, block.mlp)
    before, after = block.input_layernorm.weight.detach(), block.post_attention_layernorm.weight.detach()
    q_scale = 1.0 if shape.qk_norm else shape.head_dim**-0.5

    def pairs(matrix: Tensor) -> Tensor:
        return _paired(matrix, shape)

    def scaled_pairs(matrix: Tensor) -> Tensor:
        return _paired(matrix, shape) * q_scale

    return base._replace(
        qkv=_with_delta(base.qkv, (q, k, v), (scaled_pairs, pairs, _same), before),
        out=_with_delta(base.out, (o,), (_same,), None),
        gate_up=_with_delta(base.gate_up, (gate, up), (_same, _same), after),
        down=_with_delta(base.down, (down,), (_same,), None),
    )


def adapted_indices(model: Any) -> tuple[int, ...]:
    """Indices of the layers that carry an adapter."""
    layers = model.model.layers
    return tuple(index for index, block in enumerate(layers) if any(_has_adapter(m) for m in _modules(block.self_attn, block.mlp)))


def _base_version(model: Any) -> int:
    """Changes whenever a base parameter is replaced or written in place, so that fused copies know when they are stale."""
    return hash(tuple((parameter.data_ptr(), parameter._version) for name, parameter in model.named_parameters() if "lora_" not in name))


class _Base(NamedTuple):
    weight: Tensor
    bias: Any


def _modules(attention: Any, mlp: Any) -> tuple[Any, ...]:
    return tuple(getattr(attention if name in ("q_proj", "k_proj", "v_proj", "o_proj") else mlp, name) for name in _PARTS)


def _base(module: Any) -> _Base:
    inner = module.base_layer if hasattr(module, "base_layer") else module
    return _Base(inner.weight, inner.bias)


def _has_adapter(module: Any) -> bool:
    return hasattr(module, "lora_A") and "default" in module.lora_A


def _with_delta(
    linear: FusedLinear, modules: Sequence[Any], reorder: Sequence[Callable[[Tensor], Tensor]], norm: Tensor | None
) -> FusedLinear:
    if not any(_has_adapter(module) for module in modules):
        return linear
    ups, downs = [], []
    for module, order in zip(modules, reorder, strict=True):
        if _has_adapter(module):
            ups.append(order(module.lora_B["default"].weight) * module.scaling["default"])
            downs.append(module.lora_A["default"].weight if norm is None else module.lora_A["default"].weight * norm)
        else:
            ups.append(_base(module).weight.new_zeros(_base(module).weight.shape[0], 0))
    up = ups[0] if len(ups) == 1 else _block_diagonal(ups)
    return linear._replace(up=up, down=downs[0] if len(downs) == 1 else torch.cat(downs))


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """(sum of rows, sum of columns); blocks without columns only take up rows."""
    columns = sum(block.shape[1] for block in blocks)
    rows, before = [], 0
    for block in blocks:
        rows.append(torch.nn.functional.pad(block, (before, columns - before - block.shape[1])))
        before += block.shape[1]
    return torch.cat(rows)


def _paired(tensor: Tensor, shape: LlamaShape) -> Tensor:
    """Puts rows i and i + D/2 of every head next to each other."""
    half = shape.head_dim // 2
    rest = tensor.shape[1:]
    return tensor.reshape(-1, 2, half, *rest).transpose(1, 2).reshape(-1, *rest)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _adapter_is_plain(model: Any) -> bool:
    """Only plain LoRA on the seven block matrices is fused; DoRA, other adapters or other modules are not."""
    plain = {id(module) for block in model.model.layers for module in _modules(block.self_attn, block.mlp)}
    for module in model.modules():
        if hasattr(module, "lora_A") and (id(module) not in plain or set(module.lora_A) - {"default"}):
            return False
        if len(getattr(module, "lora_magnitude_vector", None) or ()) > 0:
            return False
    return True
