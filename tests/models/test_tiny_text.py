"""The tiny agent that reads characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandmill.environments.task import Message
from sandmill.models.chat import Answer, dialogue_for
from sandmill.models.loading import load
from sandmill.models.model import StopReason
from sandmill.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer()


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")))
def test_printable_text_round_trips_a_token_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_others_become_one_unknown_each() -> None:
    ids = TOKENIZER.encode("a\u00e9\U0001f600\x1b", add_special_tokens=False)
    assert ids[1:] == [TOKENIZER.unk_token_id] * 3


def test_it_is_loaded_by_name_from_a_seed_and_speaks_in_lines(tmp_path) -> None:
    loaded, again, other = load("sandmill/tiny-text", seed=3), load("sandmill/tiny-text", seed=3), load("sandmill/tiny-text", seed=4)
    assert loaded.digest == again.digest != other.digest
    dialogue = dialogue_for(loaded)
    assert dialogue.text(dialogue.open([Message.user("3 + 4 = ?")])) == "Q: 3 + 4 = ?\n"
    assert dialogue.parse(TOKENIZER.encode("= 7\n", add_special_tokens=False), StopReason.STOP) == (Answer(text="7"),)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert load(str(tmp_path)).digest == loaded.digest
