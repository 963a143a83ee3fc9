"""Small real models shared by this room's tests."""

from __future__ import annotations

import pytest
import torch

from sandmill.models.loading import LoadedModel, loaded_model
from sandmill.models.tiny import build_tiny, word_tokenizer

WORDS = tuple(f"w{index}" for index in range(90))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> LoadedModel:
    return build_tiny(WORDS, seed=3)


@pytest.fixture
def random_model():
    return _random_model


def _random_model(kind: str, seed: int = 0, **changes: object) -> LoadedModel:
    """A random model of a Hugging Face architecture, wide enough to be peaked, small enough to be quick."""
    import transformers

    words = ("<pad>", "<eos>", "<unk>", "\n", "Q:", "$", "=", ";", "none", "error", *WORDS)
    sizes: dict[str, object] = {
        "vocab_size": len(words),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 160,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    if kind in ("Llama", "Qwen2", "Qwen3", "Mistral"):
        sizes |= {"num_key_value_heads": 2}
    sizes |= changes
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.6 if "embed" in name else 1.4 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return loaded_model(model, word_tokenizer(words), f"random/{kind}")


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = (
    "{% if tools %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '\\n<tools>' + (tools | tojson) + '</tools> call with <tool_call>"
    "<|im_end|>\\n' }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'assistant' and not loop.last %}"
    "{{ '<|im_start|>assistant\\n' + message['content'].split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Makes a byte-level BPE tokenizer with Qwen's special tokens and the given chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def make(template: str | None, *, eos: str = "<|endoftext|>", name: str = "local"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
        backend.train_from_iterator(["count the files in the folder and answer\n\n", "$ wc -l a.txt\n", "Output:\n"] * 4, trainer)
        specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        plain = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
        backend.add_tokens([AddedToken(token, special=token in specials, normalized=False) for token in (*specials, *plain)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, clean_up_tokenization_spaces=False)
        tokenizer.chat_template = template
        tokenizer.name_or_path = name
        return tokenizer

    return make


@pytest.fixture
def chatml(byte_tokenizer):
    return byte_tokenizer(CHATML)


@pytest.fixture
def thinking(byte_tokenizer):
    return byte_tokenizer(THINKING)
