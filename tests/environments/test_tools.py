"""Tool descriptions keep their schema as text."""

import json

import pytest

from sandmill.environments.tools import BASH, Tool


def test_bash_takes_one_command():
    definition = json.loads(BASH.definition())
    assert definition["type"] == "function"
    assert definition["function"]["name"] == "bash"
    assert definition["function"]["parameters"]["required"] == ["command"]


def test_each_tool_keeps_its_own_parameters_and_no_nulls_appear():
    other = Tool(name="find", description='says "hi"', parameters='{"type":"object","properties":{"path":{"type":"string"}}}')
    definitions = [json.loads(tool.definition()) for tool in (BASH, other)]
    assert [list(d["function"]["parameters"]["properties"]) for d in definitions] == [["command"], ["path"]]
    assert "null" not in BASH.definition() + other.definition()


@pytest.mark.parametrize("schema", ["[]", "not json", '"x"'])
def test_a_schema_that_is_no_object_is_refused(schema):
    with pytest.raises(ValueError, match=r"JSON|Expecting"):
        Tool(name="x", description="", parameters=schema)
