"""Nothing an agent writes can act on a terminal, a page or a spreadsheet; ordinary text passes unchanged."""

from __future__ import annotations

import html.parser
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.reports.inert import inert, inert_block, inert_cell, inert_html, script_json

ANY_TEXT = st.text(alphabet=st.characters(codec=None), max_size=60)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "␛[31mred"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\0b", "a␀b"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("\x7f", "␡"),
        ("exe.\u202etxt", "exe.⟨U+202E⟩txt"),
        ("\u2066x\u2069\u200b", "⟨U+2066⟩x⟨U+2069⟩⟨U+200B⟩"),
        ("\ud835", "⟨U+D835⟩"),
        ("a\nb\tc\rd", "a␊b␉c␍d"),
        ("\u2028\u2029\x85", "⟨U+2028⟩⟨U+2029⟩⟨U+0085⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("Grüße, 漢字, עברית, 🙂 naïve", "Grüße, 漢字, עברית, 🙂 naïve"),
        ("e\u0301" + "\u0301" * 9, "e" + "\u0301" * 4 + "⟨U+0301⟩" * 6),
    ],
)
def test_what_could_act_is_made_visible(text, shown):
    assert inert(text) == shown


@given(ANY_TEXT)
def test_no_active_character_survives_and_the_result_can_always_be_written(text):
    for shown in (inert(text), inert_block(text).replace("\n", "").replace("\t", "")):
        assert not [one for one in shown if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]
        shown.encode("utf-8")


@given(ANY_TEXT)
def test_inert_text_is_a_fixed_point(text):
    assert inert(inert(text)) == inert(text)


def test_a_limit_says_how_much_is_missing():
    assert inert("x" * 5000, limit=10) == "x" * 10 + "… (4,990 more characters)"


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


@given(ANY_TEXT | st.text(alphabet="<>&\"'/=! -scripton", max_size=40))
def test_no_text_opens_a_tag_or_leaves_an_attribute(text):
    parser = _Tags()
    parser.feed(f'<p title="{inert_html(text)}">{inert_html(text)}</p>')
    parser.close()
    assert parser.found == ["p"]


@given(ANY_TEXT)
def test_json_inside_a_script_element_cannot_end_it_and_reads_back(text):
    written = script_json({"text": inert_block(text)})
    assert written.isascii()
    assert "<" not in written
    assert json.loads(written)["text"] == inert_block(text)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =cmd|' /C calc'!A0", "\n=1"])
def test_a_cell_never_starts_a_formula(text):
    assert inert_cell(text)[0] in "'␍"
    assert inert_cell("plain = text") == "plain = text"
