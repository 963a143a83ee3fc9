"""Runs beside NeMo Gym, in its sandbox: one resources server, its rows as tasks, its tools, and its verify as the grader.

Each episode's process makes a server of its own and calls it as HTTP would, cookies included, without a socket. What the model did goes to
verify as an object of OpenAI's Responses API, which is what servers are written for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import sys
import typing
from typing import Any

from turns import unsaid, words

AT_ONCE = 16
"""Episodes of one sandbox: each process has threads of its own."""
MOST_ROWS = 200_001
OWN = {"reward", "mask_sample", "failure_kind", "failure_reason", "responses_create_params", "response", "reward_components"}


class NemoGym:
    """One resources server; in an episode's process also the episode."""

    def __init__(self, folder: str, kind: Any, config: dict[str, Any], rows: dict[str, str]) -> None:
        self.folder, self.kind, self.config = folder, kind, config
        self.name = os.path.basename(folder)
        self.rows = {split: rows_of(path or os.path.join(folder, "data", "example.jsonl")) for split, path in rows.items()}
        self.make()  # what its configuration lacks is found here
        self.client: Any = None
        self.row: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        self.output: list[dict[str, Any]] = []

    def make(self) -> Any:
        """A fresh server's application."""
        from nemo_gym.server_utils import BaseServerConfig, ServerClient
        from omegaconf import OmegaConf

        client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create({}))
        config = self.kind.model_fields["config"].annotation.model_validate(self.config)
        return self.kind(config=config, server_client=client).setup_webserver()

    def describe(self) -> dict[str, Any]:
        """See protocol.Description."""
        meta = importlib.metadata.metadata("nemo-gym").json
        tools = {json.dumps(definition) for rows in self.rows.values() for row in rows for definition in definitions(row)}
        return {
            "name": self.name,
            "version": str(meta["version"]),
            "licence": str(meta.get("license_expression") or meta.get("license") or "").strip().split("\n")[0][:80],
            "splits": {split: len(rows) for split, rows in self.rows.items()},
            "reward": "the server's own, usually 0 or 1",
            "multi_turn": True,
            "tools": sorted(tools),
            "sessions": AT_ONCE,
        }

    def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row."""
        rows = self.rows[split][start:stop]
        return [{"prompt": prompt_of(row, f"row {start + number}"), "row": row} for number, row in enumerate(rows)]

    async def open(self, row: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Opened."""
        await self._begin(row)
        return {"prompt": prompt_of(row, "the row"), "tools": [json.dumps(one) for one in definitions(row)]}

    async def _begin(self, row: dict[str, Any]) -> None:
        import httpx

        os.chdir(self.folder)
        self.row = row
        app = self.make()
        self.lifespan = app.router.lifespan_context(app)
        await self.lifespan.__aenter__()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None)
        seeded = await self.client.post("/seed_session", json=row)
        if seeded.status_code != 200:
            raise RuntimeError(f"seed_session answered {seeded.status_code}: {seeded.text[:200]}")

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A tool: what the server answers to it goes to the model, errors too. See protocol.Step."""
        self.turns.append({"text": "", "call": {"name": tool, "arguments": arguments}})
        status, text = await self._post(tool, arguments)
        self.turns[-1]["result"] = text
        return {"observation": text, "ok": status == 200}

    async def _post(self, tool: str, arguments: Any) -> tuple[int, str]:
        answer = await self.client.post(f"/{tool}", json=arguments)
        return answer.status_code, answer.text

    async def reply(self, text: str) -> dict[str, Any]:
        """A turn without a call ends the episode. See protocol.Step."""
        self.turns.append({"text": text, "call": None})
        return {"observation": "", "done": True}

    async def finish(self, answer: str | None, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What verify says."""
        last = unsaid(self.turns, messages, limit)
        if last:
            self.turns.append({"text": last, "call": None})
        for turn, text in zip(self.turns, words(self.turns, messages), strict=True):
            turn["text"] = text
        given = {key: value for key, value in self.row.items() if key != "responses_create_params"}
        return scored(await self._verify(given, response(self.row, self.turns, limit)))

    async def _verify(self, given: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        asked = {**given, "responses_create_params": bare(self.row["responses_create_params"]), "response": made}
        answer = await self.client.post("/verify", json=asked)
        if answer.status_code != 200:
            raise RuntimeError(f"verify answered {answer.status_code}: {answer.text[:300]}")
        return dict(answer.json())

    async def replay(self, number: int) -> dict[str, Any] | None:
        """A recorded rollout that comes with the server, graded again, beside the reward that was recorded; None past the last one."""
        recorded = rows_of(os.path.join(self.folder, "data", "example_rollouts.jsonl"))
        if number >= len(recorded):
            return None
        one = recorded[number]
        prompt = spelled(one)
        same = [row for row in self.rows["train"] if spelled(row) == prompt]
        given = dict(same[0]) if same else {key: value for key, value in one.items() if key in self._asked()}
        await self._begin({**given, "responses_create_params": one["responses_create_params"]})
        for item in one["response"].get("output") or []:
            if item.get("type") == "function_call":
                await self._post(item["name"], json.loads(item["arguments"]))
        given.pop("responses_create_params", None)
        given.pop("response", None)
        found = await self._verify(given, bare(one["response"]))
        return {"recorded": one["reward"], "reward": found["reward"]}

    def _asked(self) -> set[str]:
        """Fields of what its verify takes."""
        body = typing.get_type_hints(self.kind.verify).get("body")
        return set(getattr(body, "model_fields", {}))


def scored(found: dict[str, Any]) -> dict[str, Any]:
    """See protocol.Score. A sample that the server masks was not measured."""
    if found.get("mask_sample"):
        raise RuntimeError(f"the server could not measure it: {found.get('failure_kind')} {str(found.get('failure_reason'))[:200]}")
    parts = {key: value for key, value in found.items() if key not in OWN and isinstance(value, (int, float)) and math.isfinite(value)}
    return {"reward": found.get("reward"), "parts": {**parts, **(found.get("reward_components") or {})}}


def response(row: dict[str, Any], turns: list[dict[str, Any]], limit: str | None) -> dict[str, Any]:
    """What a model's server would have answered, in the Responses API."""
    output: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if turn["text"]:
            content = [{"annotations": [], "text": turn["text"], "type": "output_text"}]
            output.append({"id": f"msg_{number}", "content": content, "role": "assistant", "status": "completed", "type": "message"})
        if turn["call"]:
            call = {"name": turn["call"]["name"], "arguments": json.dumps(turn["call"]["arguments"]), "call_id": f"call_{number}"}
            output.append({**call, "id": f"fc_{number}", "status": "completed", "type": "function_call"})
            output.append({"call_id": f"call_{number}", "output": turn.get("result", ""), "type": "function_call_output"})
    cut = limit in ("tokens", "context")
    return {
        "id": "resp_0",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": bare(row["responses_create_params"].get("tools") or []),
        **({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}} if cut else {"status": "completed"}),
    }


def spelled(row: dict[str, Any]) -> Any:
    """A prompt as what it says, however many optional members its messages were recorded with."""
    given = row["responses_create_params"].get("input")
    if isinstance(given, str):
        return [("user", given)]
    return [(message.get("role"), texts(message.get("content"))) for message in given or []]


def texts(content: Any) -> Any:
    """The words of a message's content."""
    return [part.get("text") for part in content] if isinstance(content, list) else [content]


def bare(value: Any) -> Any:
    """Without members that are null: what recorded them wrote every field, and not every field takes null. A tool needs two that do."""
    if isinstance(value, dict):
        found: dict[str, Any] = {key: bare(inner) for key, inner in value.items() if inner is not None}
        return {"strict": None, "parameters": None, **found} if value.get("type") == "function" and "name" in value else found
    return [bare(inner) for inner in value] if isinstance(value, list) else value


def rows_of(path: str) -> list[dict[str, Any]]:
    """Rows of a JSONL file. Raises with its line for what is none."""
    found: list[dict[str, Any]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and len(found) < MOST_ROWS:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{os.path.basename(path)}, line {number}, column {error.colno}: {error.msg}") from None
                if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
                    raise LookupError(f"{os.path.basename(path)}, line {number}: field 'responses_create_params' is missing")
                found.append(row)
    return found


def prompt_of(row: dict[str, Any], place: str) -> list[dict[str, str]]:
    """How the conversation begins. Raises for what is no text."""
    given = row["responses_create_params"].get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not messages:
        raise LookupError(f"{place}: field 'responses_create_params.input' is {type(given).__name__}, not a text or a list of messages")
    instructions = row["responses_create_params"].get("instructions")
    begun = [{"role": "system", "content": instructions}] if instructions else []
    return [*begun, *(said(message, place) for message in messages)]


def said(message: dict[str, Any], place: str) -> dict[str, str]:
    """One message. Images, and calls made before the episode, have no place in a prompt here."""
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") not in ("input_text", "output_text", "text") for part in content):
            raise TypeError(f"{place}: field 'responses_create_params.input' has more than text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or "role" not in message:
        raise TypeError(f"{place}: field 'responses_create_params.input' has a {message.get('type') or 'message'} that is no text")
    return {"role": "system" if message["role"] == "developer" else str(message["role"]), "content": content}


def definitions(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The function tools of a row."""
    found = []
    for tool in row["responses_create_params"].get("tools") or []:
        if tool.get("type", "function") == "function":
            parameters = tool.get("parameters") or {"type": "object", "properties": {}}
            described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
            found.append({"type": "function", "function": described})
    return found


def configuration(folder: str, name: str) -> dict[str, Any]:
    """The server's own section of one of its configuration files."""
    from omegaconf import OmegaConf

    place = os.path.join(folder, "configs")
    there = sorted(one for one in os.listdir(place) if one.endswith(".yaml")) if os.path.isdir(place) else []
    wanted = name or (f"{os.path.basename(folder)}.yaml" if f"{os.path.basename(folder)}.yaml" in there else next(iter(there), ""))
    if not wanted:
        return {}
    if wanted not in there:
        raise LookupError(f"there is no configuration {wanted!a}; there are {', '.join(there)}")
    whole = OmegaConf.load(os.path.join(place, wanted))
    for section in OmegaConf.to_container(whole).values():
        for name in (section.get("resources_servers") or {}) if isinstance(section, dict) else ():
            server = next(one for one in whole.values() if "resources_servers" in one).resources_servers[name]
            return {key: resolved(server, key) for key in server}
    return {}


def resolved(server: Any, key: str) -> Any:
    """A setting with what it refers to; as it is written where that is another server's or a model's."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = server[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return OmegaConf.to_container(server)[key]


def load(options: dict[str, Any]) -> NemoGym:
    """The resources server that `options` name; another name is refused with the nearest one."""
    noted = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return "0" if distribution_name == "ray" else noted(distribution_name)  # noted on import; no resources server runs on it

    importlib.metadata.version = version
    import nemo_gym
    from nemo_gym.base_resources_server import SimpleResourcesServer

    assert nemo_gym.__file__ is not None
    place = os.path.join(os.path.dirname(os.path.dirname(nemo_gym.__file__)), "resources_servers")
    folder = os.path.join(place, options["server"])
    known = [one for one in os.listdir(place) if os.path.exists(os.path.join(place, one, "app.py"))]
    if options["server"] not in known:
        near = difflib.get_close_matches(options["server"], known, n=1, cutoff=0.0)
        raise LookupError(f"there is no resources server {options['server']!a}; the nearest is {near[0]}")
    sys.path.insert(0, folder)
    os.chdir(folder)
    app = importlib.import_module("app")
    kinds = [
        one
        for one in vars(app).values()
        if inspect.isclass(one) and issubclass(one, SimpleResourcesServer) and one.__module__ == "app" and not inspect.isabstract(one)
    ]
    kinds = [one for one in kinds if not any(other is not one and issubclass(other, one) for other in kinds)]
    if len(kinds) != 1:
        raise LookupError(f"its app.py has {len(kinds)} servers")
    own = {"name": options["server"], "host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}
    config = {**configuration(folder, options["configuration"]), **own, **options["arguments"]}
    return NemoGym(folder, kinds[0], config, options["rows"])
