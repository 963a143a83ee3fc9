"""A real arena for tests: real sandboxes, the real shell environment and line dialogue, and a scripted model as the policy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.builtin.shell import ShellEnvironment, vocabulary
from sandmill.environments.grading import GraderHealth
from sandmill.environments.interaction import offer_of
from sandmill.environments.task import Task
from sandmill.models.engines.scripted import ScriptedModel
from sandmill.models.line_dialogue import LineDialogue
from sandmill.models.model import Sampling
from sandmill.models.tiny import word_tokenizer
from sandmill.rollouts.arena import Arena, Limits, SandboxSource
from sandmill.rollouts.seeds import derive
from sandmill.sandboxes import SandboxSpec, loop

R = TypeVar("R")
SEED = 7
LONG = "x" * (1 << 18)
"""One word that is longer than the system lets an argument be."""
HOG = "python3 -c 'bytearray(200<<20)'".replace(" ", "${IFS}")
FILL = "head -c 9000000 /dev/zero >big".replace(" ", "${IFS}")
"""Commands that are one word each."""
EXTRA = (
    LONG,
    "sleep",
    "5",
    "true",
    "false",
    "printf",
    "echo",
    "kill",
    "-9",
    "-1",
    "yes",
    "exit",
    "'\\xf0\\x9f'",
    "'\\033[31mred\\0'",
    "hello",
    "|",
    "-l",
    "*",
    "<",
    ">",
    "guess",
    "double",
    "raise",
    "hang",
    "stop",
    "higher",
    "lower",
    "noted",
    "ges",
    HOG,
    FILL,
)
TOKENIZER = word_tokenizer(
    tuple(dict.fromkeys(("<pad>", "<eos>", "<unk>", "\n", "Q:", "$", "=", ";", "none", "error", *vocabulary(), *EXTRA)))
)
DIALOGUE = LineDialogue(TOKENIZER, context_length=512)
Script = Callable[[Task, int], str]
"""(task, turn) -> the line the policy writes, without its newline."""


def ids(line: str) -> list[int]:
    """A line and the newline that ends it."""
    return [*TOKENIZER.encode(line, add_special_tokens=False), *TOKENIZER.encode("\n", add_special_tokens=False)]


def environment(*families: str) -> ShellEnvironment:
    options = {"families": list(families)} if families else {}
    return ShellEnvironment(EnvironmentSection(name="shell@1.0.0", train_tasks=24, held_out_tasks=24, options=options))


def solver(env: ShellEnvironment) -> Script:
    """The reference policy: the reference commands, then the expected answer."""

    def line(task: Task, turn: int) -> str:
        commands = env.solution(task)
        return f"$ {commands[turn]}" if turn < len(commands) else f"= {env.expected_answer(task)}"

    return line


def play(turns: Sequence[str]) -> Script:
    """The same lines for every task."""
    return lambda _task, turn: turns[turn % len(turns)]


@asynccontextmanager
async def arena(
    env: Any, script: Script, tasks: Mapping[str, Task], *, max_sandboxes: int = 8, max_in_flight: int = 64, **limits: Any
) -> Any:
    """An arena whose policy writes what `script` says; `tasks` names the task of each group, by which a session knows its own."""
    places = itertools.product(tasks.items(), range(32), range(3))
    owner = {derive(SEED, "episode", group, index, attempt): task for (group, task), index, attempt in places}

    def replies(seed: int, turn: int, context: tuple[int, ...]) -> list[int]:
        return ids(script(owner[seed], turn))

    source = SandboxSource(SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20), capacity=max_sandboxes, ready=2)
    settings = {"max_turns": 4, "max_completion_length": 32, "command_timeout_s": 5.0, "max_observation": 500, **limits}
    try:
        yield Arena(
            environment=env,
            model=ScriptedModel(replies),
            dialogue=LineDialogue(TOKENIZER, context_length=512, offer=offer_of(env)),
            sandboxes=source,
            limits=Limits(**settings),
            max_in_flight=max_in_flight,
            seed=SEED,
            health=GraderHealth(),
        )
    finally:
        await source.close()


def run(work: Coroutine[Any, Any, R]) -> R:
    """Runs on the sandbox loop, with a deadline."""
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, 60), loop()).result()


SAMPLING = Sampling(max_new_tokens=32, stop_ids=DIALOGUE.stop_ids)
