"""Tool descriptions for prompts: name, description and a JSON schema kept as text.

The schema stays JSON text from here to the prompt: a store that merges the columns of several tools would add foreign parameters as nulls.
"""

from __future__ import annotations

import json

import msgspec


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool the agent may call. `parameters` is the JSON schema of its arguments, as text."""

    name: str
    description: str
    parameters: str

    def __post_init__(self) -> None:
        if not isinstance(json.loads(self.parameters), dict):
            raise ValueError(f"the parameters of tool {self.name} must be a JSON schema object")

    def definition(self) -> str:
        """The function definition that chat templates take, as JSON text."""
        head = f'"name":{json.dumps(self.name)},"description":{json.dumps(self.description)}'
        return f'{{"type":"function","function":{{{head},"parameters":{self.parameters}}}}}'


BASH = Tool(
    name="bash",
    description="Runs a command with bash in the task's folder and returns what it printed.",
    parameters=(
        '{"type":"object","properties":{"command":{"type":"string","description":"The command line to run."}},'
        '"required":["command"],"additionalProperties":false}'
    ),
)
