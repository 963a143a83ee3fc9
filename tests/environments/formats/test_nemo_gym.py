"""NeMo Gym's rows and verdicts, as its adapter reads them: what is no text, no row or no measurement is a reason."""

import json
import sys
from pathlib import Path

import pytest

from sandmill.environments.formats import adapters

sys.path.append(str(Path(adapters.__path__[0])))
from sandmill.environments.formats.adapters import nemo_gym

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "description": None}


def row(**params):
    return {"responses_create_params": {"input": "hello", **params}}


def test_a_prompt_is_messages_with_their_roles():
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert nemo_gym.prompt_of(row(), "row 0") == [{"role": "user", "content": "hello"}]
    assert nemo_gym.prompt_of(row(input=messages, instructions="first"), "row 0") == [
        {"role": "system", "content": "first"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize(
    "given",
    [None, [], [{"type": "function_call", "name": "x"}], [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]],
)
def test_a_prompt_that_is_no_text_is_named_with_its_row(given):
    with pytest.raises((LookupError, TypeError), match=r"row 3: field 'responses_create_params\.input'"):
        nemo_gym.prompt_of(row(input=given), "row 3")


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()) + "\n\n" + json.dumps({"prompt": "x"}) + "\n")
    with pytest.raises(LookupError, match=r"rows\.jsonl, line 3"):
        nemo_gym.rows_of(str(path))


def test_a_sample_that_the_server_masks_has_no_reward():
    with pytest.raises(RuntimeError, match="judge_unavailable the judge is away"):
        nemo_gym.scored({"reward": 0.0, "mask_sample": True, "failure_kind": "judge_unavailable", "failure_reason": "the judge is away"})
    found = nemo_gym.scored({"reward": 1.0, "f1": 0.5, "name": "x", "nan": float("nan"), "reward_components": {"a": 1.0}})
    assert found == {"reward": 1.0, "parts": {"f1": 0.5, "a": 1.0}}


def test_what_was_done_is_an_object_of_the_responses_api():
    turns = [{"text": "look", "call": {"name": "add", "arguments": {"x": 1}}, "result": "2"}, {"text": "two", "call": None}]
    made = nemo_gym.response(row(tools=[TOOL]), turns, None)
    assert [item["type"] for item in made["output"]] == ["message", "function_call", "function_call_output", "message"]
    assert made["output"][1]["call_id"] == made["output"][2]["call_id"]
    assert (made["status"], made["tools"][0]["strict"]) == ("completed", None)
    assert nemo_gym.response(row(), turns, "tokens")["incomplete_details"] == {"reason": "max_output_tokens"}
