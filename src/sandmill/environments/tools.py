"""Tools in; their definitions for prompts out: name, description and a JSON schema kept as text.

The schema stays JSON text from here to the prompt: a store that merges the columns of several tools would add foreign parameters as nulls.
"""

from __future__ import annotations

import json
import re

import msgspec

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool the agent may call. `parameters` is the JSON schema of its arguments, as text.

    With `argv` it is a program in the agent's own sandbox, which gets the arguments as JSON on its standard input and whose output is
    the result; otherwise the environment carries it out (`Interaction.call`).
    """

    name: str
    description: str
    parameters: str
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!a} is no name for a tool: use letters, digits, _ and -")
        if not isinstance(json.loads(self.parameters), dict):
            raise ValueError(f"the parameters of tool {self.name} must be a JSON schema object")

    @property
    def first_parameter(self) -> str | None:
        """The argument that a call with one bare text means: the first required one, else the first."""
        schema = json.loads(self.parameters)
        names = [*schema.get("required", ()), *schema.get("properties", ())]
        return str(names[0]) if names else None

    def definition(self) -> str:
        """The function definition that chat templates take, as JSON text."""
        head = f'"name":{json.dumps(self.name)},"description":{json.dumps(self.description)}'
        return f'{{"type":"function","function":{{{head},"parameters":{self.parameters}}}}}'


BASH = Tool(
    name="bash",
    description="Run a bash script in the task's folder and return its output.",
    parameters='{"type":"object","properties":{"command":{"type":"string","description":"The script."}},"required":["command"]}',
)
"""The tool of environments that say nothing else: its argument is `command`, a script for bash in the agent's sandbox."""
