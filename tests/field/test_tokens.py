"""Field cases C: tokens, templates and tool calls. One record per sampled token; nothing is encoded twice."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sandmill.config.manifest import LoraSection
from sandmill.environments.task import Message
from sandmill.models.chat import Answer, Call, Malformed, Observation, dialogue_for
from sandmill.models.chat_dialogue import ChatDialogue
from sandmill.models.engines.torch import TorchEngine
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.model import Sample, Sampling, StopReason
from sandmill.models.tiny import build_tiny

STOP = StopReason.STOP
THINKING = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for message in messages %}"
    "{% set text = message['content'].split('</think>')[-1] if message['role'] == 'assistant' and not loop.last else message['content'] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{# calls look like <tool_call> #}"
)


def _tokenizer(template: str = THINKING) -> PreTrainedTokenizerFast:
    """Byte-level, with a special end of turn that is not the tokenizer's eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


def _chat(template: str = THINKING) -> tuple[ChatDialogue, PreTrainedTokenizerFast]:
    tokenizer = _tokenizer(template)
    return ChatDialogue(tokenizer, name="field", context_length=4096), tokenizer


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _sample(engine: TorchEngine, turns: list[list[int]], sampling: Sampling, seed: int = 0) -> list[Sample]:
    async def main():
        session = await engine.session(seed=seed)
        samples = [await session.sample(context, sampling) for context in turns]
        await session.close()
        await engine.close()
        return samples

    return asyncio.run(main())


@pytest.mark.case(27)
@pytest.mark.parametrize("issue", ["verl_6854", "verifiers_37"])
def test_verl_6854_verifiers_37_a_template_that_drops_thinking_leaves_the_sampled_ids_alone(issue):
    dialogue, tokenizer = _chat()
    thought = "<think>\nlist first\n</think>\n\n" if issue == "verl_6854" else "<think>\n</think>"
    reply = _encode(tokenizer, thought + "Answer me<|im_end|>")
    first = list(dialogue.open([Message.user("count")]))
    second = [*first, *reply, *dialogue.observe([Observation(text="7")], STOP)]
    assert second[: len(first) + len(reply)] == first + reply
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "count"}, {"role": "assistant", "content": thought + "x"}, {"role": "user", "content": "7"}],
        tokenize=False,
    )
    assert "<think>" not in rendered
    assert dialogue.rewrites_history
    assert not _chat(THINKING.replace("message['content'].split('</think>')[-1] if", "message['content'] if"))[0].rewrites_history


@pytest.mark.case(28)
def test_trl_5144_ids_log_probabilities_and_versions_are_one_record():
    with pytest.raises(ValueError, match="equal length"):
        Sample(token_ids=(1, 2), logprobs=(-0.1,), policy_versions=(0, 0), stop=STOP)
    with pytest.raises(ValueError, match="equal length"):
        Sample(token_ids=(), logprobs=(), policy_versions=(0, 0, 0), stop=STOP)


@pytest.mark.case(28)
def test_trl_5144_what_follows_a_reply_is_added_and_never_re_encoded():
    """`a` + `b` sampled as two tokens stay two tokens, although their text would encode as one."""
    tokenizer = _tokenizer()
    tokenizer.add_tokens([AddedToken("ab", normalized=False)])
    dialogue = ChatDialogue(tokenizer, name="field", context_length=4096)
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    reply = [a, b, *_encode(tokenizer, "<|im_end|>")]
    assert _encode(tokenizer, "ab") != [a, b]
    ids = [*dialogue.open([Message.user("x")]), *reply, *dialogue.observe([Observation(text="y")], STOP)]
    start = len(dialogue.open([Message.user("x")]))
    assert ids[start : start + 3] == reply
    assert dialogue.parse(reply, STOP) == (Answer(text="ab"),)


@pytest.mark.case(29)
@pytest.mark.parametrize("issue", ["rllm_816", "SkyRL_123"])
def test_rllm_816_skyrl_123_log_probabilities_belong_to_the_tokens_of_their_record(issue):
    """Recomputed from the weights for exactly the ids of the record, special and unknown tokens included."""
    loaded = build_tiny(("a", "b", "c"), seed=1)
    policy = LoraPolicy(loaded, LoraSection(r=4), seed=0)
    contexts = [[10, 11, 12], [2, 2, 11]] if issue == "rllm_816" else [[2, 12, 1]]
    samples = _sample(TorchEngine(loaded, rows=1), contexts, Sampling(max_new_tokens=12, stop_ids=frozenset()))
    ids: list[int] = []
    for context, sample in zip(contexts, samples, strict=True):
        begin = len(ids) + len(context)
        ids += [*context, *sample.token_ids]
        select = torch.zeros(1, len(ids), dtype=torch.bool)
        select[0, begin:] = True
        scored = policy.score(torch.tensor([ids]), torch.tensor([len(ids)]), select, 1.0)
        torch.testing.assert_close(scored.logprobs_K.detach(), torch.tensor(sample.logprobs), rtol=0, atol=1e-4)


@pytest.mark.case(30)
def test_skyrl_2148_a_sampled_end_keeps_its_own_log_probability():
    """One token and an unlikely end: on policy every importance ratio is 1, the end's included."""
    loaded = build_tiny(("a", "b", "c"), seed=1)
    policy = LoraPolicy(loaded, LoraSection(r=4), seed=0)
    eos = loaded.tokenizer.eos_token_id
    sampling = Sampling(max_new_tokens=30, stop_ids=frozenset({eos}))
    samples = [_sample(TorchEngine(loaded, rows=1), [[10]], sampling, seed)[0] for seed in range(12)]
    ended = [sample for sample in samples if sample.stop is STOP]
    assert ended
    for sample in ended:
        assert sample.token_ids[-1] == eos
        assert sample.logprobs[-1] < -0.5
        ids = [10, *sample.token_ids]
        select = torch.tensor([[False] + [True] * len(sample.token_ids)])
        ratios = (policy.score(torch.tensor([ids]), torch.tensor([len(ids)]), select, 1.0).logprobs_K - torch.tensor(sample.logprobs)).exp()
        torch.testing.assert_close(ratios.detach(), torch.ones(len(sample.token_ids)), rtol=0, atol=2e-4)


@pytest.mark.case(30)
def test_skyrl_2148_a_synthetic_end_is_context_and_not_sampled():
    dialogue, tokenizer = _chat()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert dialogue.observe([Observation(text="x")], StopReason.LENGTH)[0] == end
    assert dialogue.observe([Observation(text="x")], STOP)[0] != end


@pytest.mark.case(31)
def test_skyrl_1319_the_templates_end_of_turn_stops_a_reply_though_eos_is_another_token():
    dialogue, tokenizer = _chat()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end != tokenizer.eos_token_id
    assert {end, tokenizer.eos_token_id} <= dialogue.stop_ids
    assert dialogue.parse(_encode(tokenizer, "Answer: 7<|im_end|>"), STOP) == (Answer(text="7"),)
    loaded = build_tiny(("a", "b", "c"), seed=1)
    lines = dialogue_for(loaded)
    newline = loaded.tokenizer.convert_tokens_to_ids("\n")
    assert newline != loaded.tokenizer.eos_token_id
    samples = [
        _sample(TorchEngine(loaded, rows=1), [[10]], Sampling(max_new_tokens=40, stop_ids=lines.stop_ids), seed)[0] for seed in range(8)
    ]
    assert any(sample.token_ids[-1] == newline and sample.stop is STOP for sample in samples)


CUT = [
    '<tool_call>{"name": "bash", "arguments": {"command": "ls</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}',
    "<tool_call>bash ls</tool_call>",
    "<tool_call>[1, 2]</tool_call>",
    '<tool_call>{"name": "bash", "arguments": "{\\"command\\": "}</tool_call>',
    "<tool_call>" + "[" * 100000 + "</tool_call>",
]


@pytest.mark.case(32)
@pytest.mark.parametrize("call", CUT)
def test_verifiers_1763_a_cut_or_malformed_call_is_an_error_for_the_model(call):
    dialogue, tokenizer = _chat()
    (action,) = dialogue.parse(_encode(tokenizer, call + "<|im_end|>"), STOP)
    assert isinstance(action, Malformed)
    told = dialogue.text(dialogue.observe([Observation(text=action.reason, ok=False)], STOP))
    assert action.reason in told
    assert told.endswith("<|im_start|>assistant\n")


@pytest.mark.case(32)
def test_verifiers_1763_one_broken_call_does_not_spoil_its_siblings():
    dialogue, tokenizer = _chat()
    good = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    actions = dialogue.parse(_encode(tokenizer, f"{good}\n{CUT[0]}\n{good}<|im_end|>"), STOP)
    assert actions[0] == Call(tool="bash", arguments={"command": "ls"})
    assert isinstance(actions[1], Malformed)
    assert isinstance(actions[2], Malformed)
    assert "repeats" in actions[2].reason


@pytest.mark.case(33)
@pytest.mark.parametrize(
    "call",
    [
        '{"name": "bash"}',
        '{"name": "bash", "arguments": null}',
        '{"name": "bash", "arguments": {}}',
        '{"name": "bash", "arguments": {"command": 7}}',
        '{"arguments": {"command": "ls"}}',
        '{"name": 3, "arguments": {}}',
    ],
)
def test_trl_4881_a_call_without_usable_arguments_is_an_error_for_the_model(call):
    dialogue, tokenizer = _chat()
    (action,) = dialogue.parse(_encode(tokenizer, f"<tool_call>{call}</tool_call><|im_end|>"), STOP)
    assert isinstance(action, Malformed)


@pytest.mark.case(35)
def test_tinker_cookbook_506_a_length_stop_travels_with_the_turn_and_is_no_answer():
    dialogue, tokenizer = _chat()
    for stop in (StopReason.LENGTH, StopReason.CONTEXT):
        (action,) = dialogue.parse(_encode(tokenizer, "Answer: 7"), stop)
        assert isinstance(action, Malformed)
    loaded = build_tiny(("a", "b", "c"), seed=1)
    (sample,) = _sample(TorchEngine(loaded, rows=1), [[10]], Sampling(max_new_tokens=3, stop_ids=frozenset()))
    assert sample.stop is StopReason.LENGTH
