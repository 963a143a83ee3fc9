"""Small real policies and episodes for the training tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sandmill.config.manifest import LoraSection
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure
from sandmill.models.loading import loaded_model
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.model import StopReason
from sandmill.models.policy import Scored
from sandmill.rollouts.trajectory import Episode, Group, Trajectory, Turn


def scored_from_logits(logits_KV: torch.Tensor, ids_K: torch.Tensor, temperature: float) -> Scored:
    logprobs_KV = torch.log_softmax(logits_KV / temperature, dim=-1)
    chosen_K = logprobs_KV.gather(1, ids_K[:, None])[:, 0]
    return Scored(chosen_K, -(logprobs_KV.exp() * logprobs_KV).sum(-1))


class BigramPolicy:
    """float64 logits table[previous token, token]."""

    def __init__(self, table_VV: torch.Tensor) -> None:
        self.table_VV = torch.nn.Parameter(table_VV.clone().double())

    def score(self, ids_BT: torch.Tensor, lengths_B: torch.Tensor, select_BT: torch.Tensor, temperature: float) -> Scored:
        rows, positions = select_BT.nonzero(as_tuple=True)
        return scored_from_logits(self.table_VV[ids_BT[rows, positions - 1]], ids_BT[rows, positions], temperature)

    def score_packed(self, ids_N: torch.Tensor, starts: tuple[int, ...], select_N: torch.Tensor, temperature: float) -> Scored:
        positions = select_N.nonzero()[:, 0]
        return scored_from_logits(self.table_VV[ids_N[positions - 1]], ids_N[positions], temperature)

    def score_tree(
        self, ids_N: torch.Tensor, paths_BT: torch.Tensor, lengths_B: torch.Tensor, select_BT: torch.Tensor, temperature: float
    ) -> Scored:
        return self.score(ids_N[paths_BT], lengths_B, select_BT, temperature)

    def trainable(self) -> Mapping[str, torch.nn.Parameter]:
        return {"table": self.table_VV}

    def save_adapter(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({"table": self.table_VV.detach().clone()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def lora_policy(dtype: torch.dtype = torch.float64, *, fused: bool = True) -> LoraPolicy:
    """The product's own policy over the same small model, with B matrices that are not zero."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({str(i): i for i in range(23)}, unk_token="0")))
    policy = LoraPolicy(loaded_model(tiny_llama(), tokenizer, "tiny"), LoraSection(r=3, alpha=6), seed=1)
    policy.loaded.model.to(dtype)
    policy._fused = fused
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_(std=0.2)
    return policy


class LlamaPolicy:
    """A two-layer Hugging Face Llama with a peft adapter whose B matrices are not zero."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        model = tiny_llama()
        torch.manual_seed(6)
        lora = LoraConfig(
            r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        self.peft: PeftModel = get_peft_model(model, lora).to(dtype)
        self.dtype = dtype

    def score(self, ids_BT: torch.Tensor, lengths_B: torch.Tensor, select_BT: torch.Tensor, temperature: float) -> Scored:
        mask_BT = (torch.arange(ids_BT.shape[1])[None] < lengths_B[:, None]).long()
        logits_BTV = self.peft(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        rows, positions = select_BT.nonzero(as_tuple=True)
        return scored_from_logits(logits_BTV[rows, positions - 1], ids_BT[rows, positions], temperature)

    def score_packed(self, ids_N: torch.Tensor, starts: tuple[int, ...], select_N: torch.Tensor, temperature: float) -> Scored:
        count = len(ids_N)
        row_N = torch.zeros(count, dtype=torch.int64)
        for start in starts[1:]:
            row_N[start:] += 1
        position_N = torch.arange(count) - torch.tensor(starts)[row_N]
        visible_NN = (row_N[:, None] == row_N[None]) & (torch.arange(count)[:, None] >= torch.arange(count)[None])
        bias_NN = torch.zeros(count, count, dtype=self.dtype).masked_fill(~visible_NN, torch.finfo(self.dtype).min)
        logits_NV = self.peft(
            input_ids=ids_N[None], attention_mask=bias_NN[None, None], position_ids=position_N[None], use_cache=False
        ).logits[0]
        positions = select_N.nonzero()[:, 0]
        return scored_from_logits(logits_NV[positions - 1], ids_N[positions], temperature)

    def trainable(self) -> Mapping[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.peft.named_parameters() if parameter.requires_grad}

    def save_adapter(self, folder: Path) -> None:
        self.peft.save_pretrained(str(folder))


def turn(context: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0) -> Turn:
    return Turn(
        context_ids=tuple(context),
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs) if logprobs is not None else (math.log(0.1),) * len(tokens),
        policy_versions=(version,) * len(tokens),
        stop=StopReason.STOP,
    )


def episode(group: str, index: int, reward: float | None, turns: Sequence[Turn]) -> Episode:
    verdict = (
        InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason="node lost", retryable=True)
        if reward is None
        else Graded(reward=reward, passed=reward >= 1)
    )
    return Episode(
        group=group, index=index, task_id=f"task-{group}", trajectory=Trajectory(turns=tuple(turns), commands=(), spans=()), verdict=verdict
    )


def group_of(name: str, members: Sequence[tuple[float | None, Sequence[Turn]]]) -> Group:
    return Group(
        id=name, task_id=f"task-{name}", episodes=tuple(episode(name, i, reward, turns) for i, (reward, turns) in enumerate(members))
    )
