"""An environment that talks back: guess a number, by a tool of its own; a second tool is a program in the agent's sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from sandmill.environments.environment import Artifacts
from sandmill.environments.interaction import Offer, Reaction
from sandmill.environments.task import Graded, Message, Submission, Task, Verdict
from sandmill.environments.tools import Tool
from sandmill.errors import SandboxGone
from sandmill.sandboxes import Sandbox, SandboxSpec

SECRET = 42
NUMBER = '{"type":"object","properties":{"number":{"type":"string"}},"required":["number"]}'
DOUBLE = "import json, sys; print(2 * int(json.load(sys.stdin)['number']))"


class Game:
    """One episode's side."""

    def __init__(self, environment: Guessing) -> None:
        self.environment = environment
        self.guesses: list[int] = []
        self.closed = 0

    @property
    def opening(self) -> tuple[Message, ...]:
        return (Message.user("guess"),) if self.environment.opens else ()

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Reaction:
        assert tool == "guess"
        asked = str(arguments["number"])
        if asked == "raise":
            raise RuntimeError("the game \x1b[31mbroke")
        if asked == "stop":
            raise SandboxGone("a sandbox of the game's own", "its init died")
        if asked == "hang":
            await asyncio.sleep(60)
        if not asked.isdigit():
            return Reaction(text="error", ok=False)
        self.guesses.append(int(asked))
        if int(asked) == SECRET:
            return Reaction(text="", over=True)
        return Reaction(text="higher" if int(asked) < SECRET else "lower")

    async def reply(self, text: str) -> Reaction | None:
        return None if text == "stop" else Reaction(text="noted")

    async def finish(self, submission: Submission) -> bytes:
        if self.environment.breaks_at_the_end:
            raise ValueError("no score")
        return ",".join(map(str, self.guesses)).encode()

    async def close(self) -> None:
        self.closed += 1


class Guessing:
    """`opens`: the game begins the conversation itself."""

    name, version, digest = "guessing", "1.0.0", "0" * 64
    sandbox = SandboxSpec()
    offer = Offer(
        tools=(
            Tool(name="guess", description="Guess.", parameters=NUMBER),
            Tool(name="double", description="Double.", parameters=NUMBER, argv=("python3", "-c", DOUBLE)),
        )
    )

    def __init__(self, *, opens: bool = False, breaks_at_the_end: bool = False) -> None:
        self.opens, self.breaks_at_the_end = opens, breaks_at_the_end
        self.games: list[Game] = []
        self.graded: list[Submission] = []
        self.splits = {
            "train": (Task(id="t", prompt="hello", identity="t"),),
            "heldout": (Task(id="h", prompt="hello", identity="h"),),
        }

    async def interact(self, task: Task, seed: int) -> Game:
        self.games.append(Game(self))
        return self.games[-1]

    def files(self, task: Task) -> Mapping[str, bytes]:
        return {}

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        pass

    async def collect(self, task: Task, sandbox: Sandbox) -> Artifacts:
        return {}

    async def grade(self, task: Task, submission: Submission, artifacts: Artifacts) -> Verdict:
        self.graded.append(submission)
        guesses = submission.record.split(b",")
        return Graded(reward=1.0 / len(guesses), passed=guesses[-1] == str(SECRET).encode())
