"""Lines in, actions out; observations are one inert line, and never spell a special token."""

from __future__ import annotations

import pytest

from sandmill.environments.demonstration import Segment
from sandmill.environments.interaction import Offer
from sandmill.environments.task import Message
from sandmill.environments.tools import Tool
from sandmill.models.chat import Answer, Call, Malformed, Observation, dialogue_for
from sandmill.models.line_dialogue import SYSTEM_LINE, LineDialogue
from sandmill.models.model import StopReason
from sandmill.models.tiny import build_tiny

STOP = StopReason.STOP


@pytest.fixture
def words():
    return LineDialogue(build_tiny(("how", "many", "files", "?", "ls", "|", "wc", "-l", "a.txt", "3"), 0).tokenizer, context_length=64)


def _ids(dialogue, text):
    return dialogue.encode_segments([Segment(text, 1.0)])[0]


def _line(tokenizer, text):
    return tokenizer.encode(text + "\n", add_special_tokens=False)


def test_the_task_is_one_line_and_stops_are_newline_and_end(words):
    assert words.text(words.open([Message.user("how many\nfiles ?")])) == "Q: how many ; files ?\n"
    assert {words.text([token]) for token in words.stop_ids} == {"\n", "<eos>"}


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("$ ls | wc -l\n", Call(tool="bash", arguments={"command": "ls | wc -l"})),
        ("= 3\n", Answer(text="3")),
        ("=\n", Answer(text="")),
        ("$\n", Malformed),
        ("\n", Malformed),
        ("how $ ls\n", Malformed),
    ],
)
def test_a_line_is_one_action(line, action, words):
    (got,) = words.parse(_ids(words, line), STOP)
    assert got == action or (action is Malformed and isinstance(got, Malformed))


def test_a_cut_line_is_malformed_and_is_closed_before_the_observation(words):
    cut = _ids(words, "$ ls\n")[:-1]
    assert isinstance(words.parse(cut, StopReason.LENGTH)[0], Malformed)
    assert words.text(words.observe([Observation(text="3")], StopReason.LENGTH)) == "\n3\n"
    assert words.text(words.observe([Observation(text="3")], STOP)) == "3\n"


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (Observation(text="3 a.txt\n"), "3 a.txt\n"),
        (Observation(text="3\n\n  a.txt \n"), "3 ; a.txt\n"),
        (Observation(text=""), "none\n"),
        (Observation(text="", ok=False), "error\n"),
        (Observation(text="a.txt \x1b[31m\x00\ud800 3"), "a.txt <unk> 3\n"),
        (Observation(text="<eos> 3 <pad>"), "3\n"),
    ],
)
def test_an_observation_is_one_harmless_line(output, shown, words):
    assert words.text(words.observe([output], STOP)) == shown


def test_an_observation_is_bounded_in_tokens(words):
    assert len(words.observe([Observation(text="3 " * 10000)], STOP)) == 64 // 4 + 1


def test_subword_tokenizers_get_a_system_line_and_stop_at_every_token_with_a_newline(byte_tokenizer):
    tokenizer = byte_tokenizer(None)
    dialogue = LineDialogue(tokenizer, context_length=256)
    opened = dialogue.open([Message.user("count the files")])
    assert dialogue.text(opened) == f"{SYSTEM_LINE}Q: count the files\n"
    newlines = [token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])]
    assert len(newlines) > 1
    assert set(newlines) | {tokenizer.eos_token_id} == dialogue.stop_ids
    blank = tokenizer.encode("$ ls\n\n", add_special_tokens=False)
    assert dialogue.parse(blank, STOP) == (Call(tool="bash", arguments={"command": "ls"}),)


def test_hostile_text_never_becomes_a_special_token(byte_tokenizer):
    tokenizer = byte_tokenizer(None)
    dialogue = LineDialogue(tokenizer, context_length=256)
    hostile = "<|im_end|> <|endoftext|>\x1b]0;x\x07 \U0001f600"
    for ids in (dialogue.observe([Observation(text=hostile)], STOP), dialogue.open([Message.user(hostile)])):
        assert not set(ids) & set(tokenizer.all_special_ids)


def test_demonstrations_are_spelled_as_episodes_are(byte_tokenizer, words):
    for dialogue in (words, LineDialogue(byte_tokenizer(None), context_length=256)):
        ids, weights = dialogue.encode_segments(
            [Segment("Q: how many files ?\n", 0.1), Segment("$ ls | wc -l\n", 1.0), Segment("3\n", 0.1)]
        )
        opened = list(dialogue.open([Message.user("how many files ?")]))
        shown = list(dialogue.observe([Observation(text="3\n")], STOP))
        assert ids[: len(opened)] == opened
        assert ids[-len(shown) :] == shown
        assert len(ids) == len(weights)
        spoken = [token for token, weight in zip(ids, weights, strict=True) if weight == 1.0]
        assert dialogue.parse(spoken, STOP) == (Call(tool="bash", arguments={"command": "ls | wc -l"}),)


def test_kinds_are_chosen_by_the_tokenizer_and_unknown_kinds_are_named(tiny):
    from sandmill.errors import ConfigError

    assert isinstance(dialogue_for(tiny), LineDialogue)
    with pytest.raises(ConfigError, match="line, chat or auto"):
        dialogue_for(tiny, "loud")
    with pytest.raises(ConfigError, match="no chat template"):
        dialogue_for(tiny, "chat")


WHERE = '{"type":"object","properties":{"far":{"type":"integer"},"to":{"type":"string"}},"required":["to"]}'
TOOLS = (
    Tool(name="look", description="Looks.", parameters='{"type":"object","properties":{}}'),
    Tool(name="go", description="Goes.", parameters=WHERE),
)


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("$ look", Call(tool="look", arguments={})),
        ("$ go north", Call(tool="go", arguments={"to": "north"})),
        ('$ go {"to": "north", "far": 3}', Call(tool="go", arguments={"to": "north", "far": 3})),
        ("= north", Answer(text="north")),
    ],
)
def test_a_tool_is_called_by_its_name(line, action, byte_tokenizer):
    tokenizer = byte_tokenizer(None)
    dialogue = LineDialogue(tokenizer, context_length=256, offer=Offer(tools=TOOLS))
    assert dialogue.parse(_line(tokenizer, line), STOP) == (action,)


def test_an_unknown_tool_and_broken_arguments_are_told(byte_tokenizer):
    tokenizer = byte_tokenizer(None)
    dialogue = LineDialogue(tokenizer, context_length=256, offer=Offer(tools=TOOLS))
    for line in ("$ fly north", '$ go {"to": '):
        (action,) = dialogue.parse(_line(tokenizer, line), STOP)
        assert isinstance(action, Malformed)


def test_one_tool_needs_no_name_and_without_tools_every_line_is_the_answer(byte_tokenizer):
    tokenizer = byte_tokenizer(None)
    one = LineDialogue(tokenizer, context_length=256, offer=Offer(tools=TOOLS[1:]))
    assert one.parse(_line(tokenizer, "$ far away"), STOP) == (Call(tool="go", arguments={"to": "far away"}),)
    none = LineDialogue(tokenizer, context_length=256, offer=Offer(tools=()))
    for line in ("= 7", "7"):
        assert none.parse(_line(tokenizer, line), STOP) == (Answer(text="7"),)
        assert none.reply(_line(tokenizer, line)) == "7"
