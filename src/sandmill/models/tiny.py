"""The tiny agents: a vocabulary and a seed in, a Llama-shaped model of about half a million parameters out.

Each is an ordinary LlamaForCausalLM, so one path serves all models: it is saved, loaded, adapted and served like any other. One reads
words (split at blanks, a newline is its own token), the other characters, for environments whose words nobody knows beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sandmill.models.loading import LoadedModel, loaded_model, quiet_transformers
from sandmill.models.names import TINY_SHELL, TINY_TEXT

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MARKS = (PAD, EOS, UNKNOWN, "\n", "Q:", "$", "=", ";", "none", "error")
"""Always in the vocabulary, in this order, before the environment's words."""

CHARACTERS = (PAD, EOS, UNKNOWN, "\n", *map(chr, range(32, 127)))
"""What the agent that reads characters knows."""

WIDTH, LAYERS, HEADS, INTERMEDIATE, CONTEXT = 128, 3, 4, 256, 128
TEXT_CONTEXT = 512


def build_tiny(vocabulary: Sequence[str], seed: int) -> LoadedModel:
    """A fresh tiny agent over `vocabulary` (words without blanks); the same arguments give the same bits."""
    words = tuple(dict.fromkeys((*MARKS, *vocabulary)))
    if any(word != "\n" and (not word or word.split() != [word]) for word in words):
        raise ValueError("a vocabulary word must be non-empty and without blanks")
    return _built(words, word_tokenizer(words), TINY_SHELL, CONTEXT, seed)


def build_tiny_text(seed: int) -> LoadedModel:
    """A fresh tiny agent over printable ASCII; the same seed gives the same bits."""
    return _built(CHARACTERS, character_tokenizer(), TINY_TEXT, TEXT_CONTEXT, seed)


def _built(tokens: Sequence[str], tokenizer: Any, name: str, context: int, seed: int) -> LoadedModel:
    with quiet_transformers():
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=len(tokens),
            hidden_size=WIDTH,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=context,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            pad_token_id=tokens.index(PAD),
            eos_token_id=tokens.index(EOS),
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
            _initialise(model, seed)
    return loaded_model(model, tokenizer, name)


def word_tokenizer(words: Sequence[str]) -> Any:
    """A PreTrainedTokenizerFast over `words`; text of single-blank-separated words round-trips, unknown words become `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(Regex("[^\\S\n]+"), "removed")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="\x00", cleanup=False), decoders.Fuse(), decoders.Replace(" \n", "\n"), decoders.Replace("\n ", "\n")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def character_tokenizer() -> Any:
    """A PreTrainedTokenizerFast over `CHARACTERS`; printable ASCII round-trips, any other character becomes `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({character: index for index, character in enumerate(CHARACTERS)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def _initialise(model: Any, seed: int) -> None:
    """Wider than transformers' default of 0.02, which warm-starts several times slower at this size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = 0.06 if "embed" in name else 0.8 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
