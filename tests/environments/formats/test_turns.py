"""The words that a model wrote beside its calls find the turns that the environment saw."""

import json

from sandmill.environments.formats.adapters.turns import words


def said(text, *calls):
    return {"role": "assistant", "text": text, "calls": [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]}


def call(name, **arguments):
    return {"text": "", "call": {"name": name, "arguments": arguments}}


def test_each_turn_gets_what_stands_beside_it():
    turns = [call("a", x=1), call("b"), {"text": "end", "call": None}]
    messages = [said("one", ("a", {"x": 1})), {"role": "tool", "text": "r", "calls": []}, said("two", ("b", {})), said("end")]
    assert words(turns, messages) == ["one", "two", "end"]


def test_of_several_calls_the_first_has_the_words_and_calls_that_were_refused_have_no_turn():
    turns = [call("a", x=1), call("a", x=2)]
    messages = [said("both", ("a", {"x": 1}), ("a", {"x": 2})), said("lost", ("unknown", {}))]
    assert words(turns, messages) == ["both", ""]
    refused_first = [said("lost", ("unknown", {})), said("both", ("unknown", {}), ("a", {"x": 1}), ("a", {"x": 2}))]
    assert words(turns, refused_first) == ["both", ""]


def test_turns_that_are_in_no_message_keep_their_own_text():
    turns = [call("a", x=1), {"text": "end", "call": None}]
    assert words(turns, [said("only this", ("a", {"x": 1}))]) == ["", "end"]
