"""Runs beside a package of verifiers 0.4, in its sandbox: its taskset's tasks, their tools, and their own scoring.

The harness is ours: the model converses and calls tools until it calls none, or, where the package has an Env of its own, for as long as
that asks it. Tool servers are spoken to as MCP servers are, in this process
and without a network; what scoring needs a machine for runs in a folder of this process. A signal that did not run is a failure.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
from typing import Any

from turns import unsaid, words
from verifiers_env import Directed, roles

AT_ONCE = 16
"""Episodes of one sandbox: each process has threads of its own."""
FRAMEWORK = {"idx", "image", "workdir", "agent_user", "skills", "network_allow", "network_block", "timeout", "resources"}


class VerifiersV1:
    """One taskset; in an episode's process also the episode."""

    def __init__(self, taskset: Any, package: str, env: Any = None) -> None:
        self.taskset, self.package, self.env = taskset, package, env
        self.read: list[Any] = []
        self.stream = iter(taskset)
        self.episode: Episode
        self.directed: Directed | None = None

    async def describe(self) -> dict[str, Any]:
        """See protocol.Description."""
        meta = importlib.metadata.metadata(self.package).json
        first = self._task(0)
        if first is None:
            raise LookupError("the taskset has no tasks")
        weights = [getattr(one, "_vf_weight", 1.0) for one in first.hooks("reward")]
        return {
            "name": self.package,
            "version": str(meta.get("version", "0")),
            "licence": str(meta.get("license_expression") or meta.get("license") or "").strip().split("\n")[0][:80],
            "splits": {"train": self._count()},
            "reward": f"the weighted sum of {len(weights)} functions",
            "passes_at": sum(weight for weight in weights if weight > 0) or 1.0,
            "multi_turn": True,
            "tools": [json.dumps(one) for one in (await tools_of(servers(self.taskset, first))).definitions],
            "sessions": AT_ONCE,
        }

    def _count(self) -> int | None:
        if not self.taskset.bounded:
            return None
        self.read += list(self.stream)
        return len(self.read)

    def _task(self, number: int) -> Any:
        """Task `number` in the order in which the taskset gives them; None past its end."""
        self.read += itertools.islice(self.stream, max(0, number + 1 - len(self.read)))
        return self.read[number] if number < len(self.read) else None

    def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row."""
        found = [self._task(number) for number in range(start, stop)]
        return [self._row(number, task) for number, task in enumerate(found, start) if task is not None]

    def _row(self, number: int, task: Any) -> dict[str, Any]:
        data = task.data
        if task.NEEDS_CONTAINER or data.image or data.agent_user:
            raise TypeError(f"task {number} needs a container of its own, which is not played here")
        own = data.model_dump(mode="json", exclude=FRAMEWORK)
        metadata = {"name": data.name} if data.name else {}
        prompt = prompt_of(data)
        if data.prompt is None and self.env is not None:  # its Env opens the conversation
            prompt.append({"role": "user", "content": data.description or data.name or f"task {number}"})
        return {
            "prompt": [text_of(one) for one in prompt],
            "identity": json.dumps(own, sort_keys=True),
            "metadata": metadata,
            "row": {"number": number},
        }

    async def open(self, row: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Opened."""
        task = self._task(row["number"])
        if self.env is None:
            self.episode = Episode(self.taskset, task)
            definitions = await self.episode.begin()
        else:
            self.directed = Directed(self.env, task, lambda task, opening: Episode(self.taskset, task, opening))
            definitions = await self.directed.begin()
            self.episode = self.directed.talk
        return {"prompt": [text_of(one) for one in self.episode.opening], "tools": [json.dumps(one) for one in definitions]}

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Step. Where a condition of the task stops the conversation, the package's own Env goes on."""
        found = await self.episode.call(tool, arguments)
        if found["done"] and self.directed is not None:
            found = await self.directed.over()
        return found

    async def reply(self, text: str) -> dict[str, Any]:
        """A turn without a call ends the episode, unless the package's own Env goes on. See protocol.Step."""
        if self.directed is not None:
            step: dict[str, Any] = await self.directed.reply(text)
            return step
        self.episode.say(text, None)
        self.episode.trace.stop("agent_completed")
        return {"observation": "", "done": True}

    async def finish(self, answer: str | None, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The task's own scoring, and the Env's."""
        if self.directed is not None:
            score: dict[str, Any] = await self.directed.score(limit, messages)
            return score
        await self.episode.close(limit, messages)
        return self.episode.result()


class Tools:
    """Tool servers by the names of their tools."""

    def __init__(self) -> None:
        self.definitions: list[dict[str, Any]] = []
        self.dispatch: dict[str, tuple[Any, str]] = {}

    async def add(self, server: Any) -> None:
        """A server's tools, named as verifiers' harnesses name them."""
        from mcp.server.mcpserver import MCPServer

        mcp = MCPServer(server.server_name or type(server).__name__)
        server.register(mcp)
        for tool in await mcp.list_tools():
            name = f"{server.server_name}_{tool.name}" if server.server_name else tool.name
            if name in self.dispatch:
                raise ValueError(f"two tools have the name {name}")
            self.dispatch[name] = (mcp, tool.name)
            described = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            self.definitions.append({"type": "function", "function": described})


class Episode:
    """One attempt at a task, noted in a trace as verifiers' own rollouts are."""

    def __init__(self, taskset: Any, task: Any, opening: list[dict[str, Any]] | None = None) -> None:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.runtimes.subprocess import SubprocessConfig
        from verifiers.v1.session import hook_boundary
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.utils.decorators import discover_decorated

        self.task, self.taskset = task, taskset
        if task.NEEDS_CONTAINER or task.data.image or task.data.agent_user:
            raise TypeError("the task needs a container of its own, which is not played here")
        if task.data.prompt is None and not opening:
            raise TypeError("the task has no prompt: it waits for a user of its own to begin")
        self.opening = [*prompt_of(task.data), *(opening or [])]
        self.by_turns = False
        self.stops = task.hooks("stop")
        if discover_decorated(task, "intercept") or any(hook_boundary(stop, allow_trace=True) is not Trace for stop in self.stops):
            raise TypeError("the task steps in between the model and its requests, which is not played here")
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=AgentConfig(runtime=SubprocessConfig()))
        self.trace = Trace(task=about, state=state_cls(type(task))(), agent=agent)
        self.turns: list[dict[str, Any]] = []
        self.runtime: Any = None
        self.tools: Tools

    async def begin(self) -> list[dict[str, Any]]:
        """The task's set-up, and its tools' definitions."""
        from pathlib import Path

        from verifiers.v1.runtimes import make_runtime, subprocess
        from verifiers.v1.runtimes.subprocess import SubprocessConfig
        from verifiers.v1.utils.decorators import invoke

        subprocess.CACHE_DIR = Path(os.environ["HOME"])  # it was found when the package was loaded, by another user
        self.runtime = make_runtime(SubprocessConfig(), name=self.trace.id)
        self.runtime.env = dict(self.task.runtime_env())
        await self.runtime.start()
        await invoke(self.task.setup, {"trace": self.trace, "runtime": self.runtime})
        own = servers(self.taskset, self.task)
        for server in own:
            server._pull_state, server._push_state = self._state, nothing  # its state is the trace's own: both are in this process
            await server.setup()
        for server in own[: len(self.task.toolsets(self.task.config))]:
            await server.setup_task(self.task.data)
        self.tools = await tools_of(own)
        for message in self.opening:
            self.note(message)
        return self.tools.definitions

    async def _state(self) -> Any:
        return self.trace.state

    def note(self, message: dict[str, Any], sampled: bool = False) -> None:
        from verifiers.v1.graph import MessageNode

        nodes = self.trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    def say(self, text: str, call: dict[str, Any] | None, cut: bool = False) -> str:
        """The model's turn; the id of its call."""
        from verifiers.v1.trace import ModelCall

        self.turns.append({"text": text, "call": call})
        id = f"call_{len(self.turns)}"
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if call is not None:
            message["tool_calls"] = [{"id": id, "name": call["name"], "arguments": json.dumps(call["arguments"])}]
        self.note(message, sampled=True)
        reason = "length" if cut else "stop" if call is None else "tool_calls"
        self.trace.calls.append(ModelCall(node=len(self.trace.nodes) - 1, finish_reason=reason))
        return id

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A tool's answer, and whether one of the task's conditions stops the episode after it."""
        id = self.say("", {"name": name, "arguments": arguments})
        ok, text = await self._answer(name, arguments)
        self.note({"role": "tool", "tool_call_id": id, "content": text})
        return {"observation": text, "ok": ok, "done": await self.stopped()}

    async def _answer(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        mcp, tool = self.tools.dispatch[name]
        try:
            answer = await mcp.call_tool(tool, arguments)
        except Exception as error:  # noqa: BLE001 - what a tool raises is its answer, as over MCP
            return False, str(error)
        failed = bool(getattr(answer, "is_error", False))
        content = getattr(answer, "content", answer)
        content = content[0] if isinstance(content, tuple) else content
        return not failed, "\n".join(block.text if block.type == "text" else str(block) for block in content)

    async def stopped(self) -> bool:
        """Whether one of the task's conditions stops the conversation here."""
        from verifiers.v1.session import call_hook
        from verifiers.v1.trace import Trace

        for stop in self.stops:
            if await call_hook(stop, {Trace: self.trace}):
                self.trace.stop(stop.__name__)
                return True
        return False

    async def close(self, limit: str | None, messages: list[dict[str, Any]]) -> None:
        """The task's own end and scoring. Raises what they raise."""
        from verifiers.v1.utils.decorators import invoke

        last = unsaid(self.turns, messages, limit)
        if last is not None:
            self.say(last, None, cut=limit is not None)
        for node, text in zip([one for one in self.trace.nodes if one.sampled], words(self.turns, messages), strict=True):
            node.message.content = text
        self.trace.stop({"turns": "max_turns", "tokens": "max_output_tokens", "context": "max_total_tokens"}.get(limit or "", "timeout"))
        try:
            await invoke(self.task.finalize, {"trace": self.trace, "runtime": self.runtime})
            await self.task.score(self.trace, self.runtime)
        finally:
            await self.runtime.stop()
        self.trace.ok = True

    def result(self) -> dict[str, Any]:
        """What the rewards come to. Raises LookupError when one of them did not run."""
        missing = [name for name, reward in self.trace.rewards.items() if reward is None]
        if missing or not self.trace.rewards:
            raise LookupError(f"{', '.join(missing) or 'no reward function'} gave no reward")
        parts = {name: reward.score for name, reward in self.trace.rewards.items()}
        parts |= {name: value for name, value in self.trace.metrics.items() if value is not None and math.isfinite(value)}
        return {"reward": self.trace.reward, "parts": parts}


async def nothing(before: bytes) -> None:
    """There is no other place to which state would have to be sent."""


def servers(taskset: Any, task: Any) -> list[Any]:
    """The tool servers of a task, and those that all tasks share."""
    return [*task.toolsets(task.config), *taskset.toolsets(taskset.config)]


async def tools_of(own: list[Any]) -> Tools:
    """The tools of servers."""
    tools = Tools()
    for server in own:
        await tools.add(server)
    return tools


def prompt_of(data: Any) -> list[dict[str, Any]]:
    """How the conversation begins."""
    prompt = data.prompt
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_of(one) for one in prompt or []]
    return [{"role": "system", "content": data.system_prompt}, *said] if data.system_prompt else said


def text_of(message: dict[str, Any]) -> dict[str, Any]:
    """What the model sees of a message."""
    return {"role": message["role"], "content": message["content"]}


def message_of(message: Any) -> dict[str, Any]:
    """A message with its content as text."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content if part.type == "text")
    return {**message.model_dump(exclude_none=True), "content": content or ""}


def load(options: dict[str, Any]) -> VerifiersV1:
    """The taskset that a module exports, and its Env where it has its own, configured by `arguments`."""
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils.loaders import env_config_type, environment_class, load_taskset, taskset_config_type

    module, arguments = options["module"], options["arguments"]
    kind = environment_class(module)
    if kind is SingleAgentEnv:
        return VerifiersV1(load_taskset(taskset_config_type(module).model_validate({"id": module, **arguments})), options["package"])
    config = env_config_type(module)
    own = {name: value for name, value in arguments.items() if name in config.model_fields}
    rest = {name: value for name, value in arguments.items() if name not in own}
    env = kind(config.model_validate({**own, "taskset": {"id": module, **rest}}))
    if len(roles(env)) != 1:
        raise TypeError(
            f"its {kind.__name__} lets {len(roles(env))} agents play ({', '.join(roles(env))}), and an episode here is one policy's"
        )
    return VerifiersV1(env.taskset, options["package"], env)
