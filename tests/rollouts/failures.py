"""Faults put into real episodes at every boundary, and what becomes of each; and docs/failures.md from it.

The struck episode joins a group of three sound ones. Then it is looked at where a failure could become a number: in the verdict, in the
pass rate, and in the advantages of its siblings.   python tests/rollouts/failures.py   writes the page.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import playground as pg
from guessing import Guessing

sys.path.append(str(Path(__file__).parents[1]))
from judge_server import judge_server

from sandmill.config.manifest import AdvantageScale, EnvironmentSection, GradingSection, JudgeSection, McpSection, ToolsSection
from sandmill.environments.access.access import access_of
from sandmill.environments.isolation import isolated
from sandmill.environments.packages.install import remove
from sandmill.environments.registry import load
from sandmill.environments.task import AgentLimited, Graded, InfrastructureFailure, NoAnswer
from sandmill.errors import EngineDied, IsolationUnavailable, SandmillError
from sandmill.models.judging import EmbeddedJudge
from sandmill.rollouts.arena import Arena
from sandmill.rollouts.events import EvaluationPhase
from sandmill.rollouts.group import Breaker, run_groups
from sandmill.rollouts.trajectory import Episode, Group, Trajectory
from sandmill.sandboxes import Sandbox
from sandmill.training.advantages import group_advantages
from sandmill.training.summaries import evaluation_finished

DOCUMENT = Path(__file__).parents[2] / "docs" / "failures.md"
Take = Callable[..., Awaitable[Sandbox]]
Strike = Callable[[Arena], None]


class Seen(NamedTuple):
    """What became of a fault."""

    label: str
    attempts: int
    gradings: int
    in_pass_rate: bool
    in_training: bool


@dataclass(frozen=True)
class Injection:
    """A fault, what it must come to, how often the episode must have been tried, and how often its last try graded."""

    where: str
    what: str
    label: str
    play: Callable[[], Episode]
    attempts: int = 2
    gradings: int = 1


def label_of(episode: Episode) -> str:
    """The verdict in words."""
    verdict = episode.verdict
    if isinstance(verdict, InfrastructureFailure):
        return f"failure at {verdict.boundary.value}"
    if isinstance(verdict, AgentLimited):
        return f"graded, agent limited by {verdict.limit.value}"
    return "graded as no answer" if isinstance(verdict, NoAnswer) else "graded"


def seen(episode: Episode) -> Seen:
    """Where the struck episode counts, beside siblings with rewards 1, 0 and 1."""
    beside = [sound(reward) for reward in (1.0, 0.0, 1.0)]
    group = Group(id="g", task_id=episode.task_id, episodes=(beside[0], episode, *beside[1:]))
    with_it = group_advantages([one.reward for one in group.episodes], AdvantageScale.MEAN, 2).values
    without = group_advantages([one.reward for one in beside], AdvantageScale.MEAN, 2).values
    row = evaluation_finished(
        (group,),
        split="x",
        phase=EvaluationPhase.BEFORE,
        step=0,
        greedy=False,
        seconds=0.0,
        at_s=0.0,
        temperature=1.0,
        policy_version=0,
    )
    apart = with_it[1] is None and (with_it[0], *with_it[2:]) == without
    return Seen(label_of(episode), episode.attempt + 1, episode.gradings, row.tasks[0].graded == len(group.episodes), not apart)


def sound(reward: float) -> Episode:
    trajectory = Trajectory(turns=(), commands=(), spans=())
    return Episode(group="g", index=0, task_id="t", trajectory=trajectory, verdict=Graded(reward=reward, passed=reward == 1.0))


def struck(environment: Any, script: pg.Script, strike: Strike | None = None, **limits: Any) -> Episode:
    """One episode with its retries. `strike` changes the arena before it begins."""
    task = environment.splits["train"][0]

    async def go() -> Episode:
        async with pg.arena(environment, script, {"g": task}, **limits) as arena:
            if strike is not None:
                strike(arena)
            [group] = await run_groups(
                arena, [("g", task)], generations=1, sampling=pg.SAMPLING, breaker=Breaker(100), watch=lambda _episode: None
            )
            return group.episodes[0]

    return pg.run(go())


def shell(*lines: str, strike: Strike | None = None, **limits: Any) -> Episode:
    """An episode of the shell family; without `lines`, the reference solution."""
    environment = pg.environment("lines")
    return struck(environment, pg.play(lines) if lines else pg.solver(environment), strike, **limits)


def sandboxes(change: Callable[[Take, dict[str, bytes], int], Awaitable[Sandbox]]) -> Strike:
    """Each attempt's sandbox is what `change(take, files, number of the attempt)` gives."""

    def strike(arena: Arena) -> None:
        take, count = arena.sandboxes.take, [0]

        async def taken(files: dict[str, bytes]) -> Sandbox:
            count[0] += 1
            return await change(take, files, count[0])

        arena.sandboxes.take = taken  # type: ignore[method-assign,assignment]

    return strike


async def _of_a_lost_image(_take: Take, _files: dict[str, bytes], _number: int) -> Sandbox:
    return await Sandbox.create.aio(image="no-such-image", server="")


async def _once(take: Take, files: dict[str, bytes], number: int) -> Sandbox:
    return await (_of_a_lost_image(take, files, number) if number == 1 else take(files))


async def _killed_init(take: Take, files: dict[str, bytes], _number: int) -> Sandbox:
    """Its init dies by SIGKILL while the first command runs."""
    sandbox = await take(files)
    assert sandbox._birth is not None
    asyncio.get_running_loop().call_later(0.3, os.kill, sandbox._birth.pid, signal.SIGKILL)
    return sandbox


async def _too_many_files(take: Take, _files: dict[str, bytes], _number: int) -> Sandbox:
    return await take({"big": b"x" * (9 << 20)})


def prepared_wrongly() -> Episode:
    environment = pg.environment("lines")

    async def prepare(_task: object, sandbox: Sandbox) -> None:
        await sandbox.write.aio("/usr/lib/mine", b"x")

    environment.prepare = prepare  # type: ignore[method-assign,assignment]
    return struck(environment, pg.solver(environment))


def own_grader(body: str, **limits: Any) -> Callable[[], Episode]:
    """An environment of a user's own whose grader is `body`, in a child process as always."""

    def play() -> Episode:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "own.py")
            path.write_text(OWN.replace("BODY", body))
            section = EnvironmentSection(name=f"{path}:environment")
            environment = isolated(load(section.name, section), section.name, section)
            return struck(environment, pg.play(["= 4"]), **limits)

    return play


def asking(body: str, **limits: Any) -> Callable[[], Episode]:
    """A grader in a package's sandbox, `body`, that was given a judge and a tool server. It catches whatever they raise."""

    def play() -> Episode:
        with tempfile.TemporaryDirectory() as folder, judge_server() as judge:
            path = Path(folder, "asks.py")
            path.write_text(ASKS.replace("BODY", body))
            server = McpSection(name="abacus", command=("python3", "-c", ABACUS), timeout="2s")
            grading = GradingSection(judge=(JudgeSection(name="judge", url=judge.url, retries=0, timeout="2s"),), mcp=("abacus",))
            section = EnvironmentSection(name=f"python/{path}", train_tasks=2, held_out_tasks=1)
            environment = load(section.name, section, access=access_of(grading, ToolsSection(mcp=(server,)), EmbeddedJudge.of))
            try:
                return struck(environment, pg.play(["= 4"]), **limits)
            finally:
                pg.run(environment.close())  # type: ignore[attr-defined]
                remove(environment.installed.key)  # type: ignore[attr-defined]

    return play


ABACUS = (Path(__file__).parents[1] / "environments" / "mcp" / "abacus.py").read_text()
ASKS = """
import json, urllib.request
SPLITS = ("train", "heldout")

def tasks(split):
    return [{"prompt": f"{split} {n}?", "answer": "4"} for n in range(3)]

def post(path, body):
    request = urllib.request.Request("http://127.0.0.1:8399" + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=20).read()

def ask(word, model="judge"):
    post("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": word}]})

def use(how):
    post("/mcp/abacus", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "misbehave", "arguments": {"how": how}}})

def reward(completion, answer):
    try:
        BODY
    except Exception:
        pass
    return 0.5
"""
OWN = """
import os, sys, time
from sandmill.environments.task import *
from sandmill.sandboxes import SandboxSpec


class Own:
    name, version, digest, sandbox = "own", "0.1.0", "d", SandboxSpec()
    splits = {"train": [Task(id="a", prompt="5", identity="a")], "heldout": [Task(id="b", prompt="6", identity="b")]}

    def files(self, task): return {}
    async def prepare(self, task, sandbox): pass
    async def collect(self, task, sandbox): return {}
    async def grade(self, task, submission, artifacts):
        BODY


environment = Own()
"""


def dead_engine() -> Episode:
    """Not an episode's failure: the run ends, and nothing of it is a verdict."""
    return shell(strike=lambda arena: arena.model.die("killed"))  # type: ignore[attr-defined]


def hanging_tool() -> Episode:
    return struck(Guessing(), pg.play(["$ guess hang"]), environment_timeout_s=0.5)


def unfinished_side() -> Episode:
    return struck(Guessing(breaks_at_the_end=True), pg.play(["= stop"]))


AT = "failure at "
INJECTIONS = (
    Injection("sandbox", "it cannot be created", AT + "sandbox-create", lambda: shell(strike=sandboxes(_of_a_lost_image)), gradings=0),
    Injection("sandbox", "it cannot be created the first time", "graded", lambda: shell(strike=sandboxes(_once))),
    Injection(
        "sandbox", "the task's files do not fit it", AT + "sandbox-create", lambda: shell(strike=sandboxes(_too_many_files)), gradings=0
    ),
    Injection("sandbox", "preparing it breaks", AT + "setup", prepared_wrongly, gradings=0),
    Injection("sandbox", "its init is killed", AT + "sandbox-lost", lambda: shell("$ sleep 5", strike=sandboxes(_killed_init)), gradings=0),
    Injection("command", "it exits with 1", "graded", lambda: shell("$ false", "= none"), 1),
    Injection("command", "it runs past its deadline", "graded", lambda: shell("$ sleep 5", "= none", command_timeout_s=0.3), 1),
    Injection("command", "it needs more memory than there is", "graded", lambda: shell(f"$ {pg.HOG}", "= none"), 1),
    Injection("command", "it fills the disk", "graded", lambda: shell(f"$ {pg.FILL}", "= none"), 1),
    Injection("command", "it kills every process it can", "graded", lambda: shell("$ kill -9 -1", "= none"), 1),
    Injection("command", "it cannot be started", "graded", lambda: shell(f"$ {pg.LONG}", "= none"), 1),
    Injection("model", "the reply is cut at its length", "graded, agent limited by tokens", lambda: shell("= " + "none " * 64), 1),
    Injection("model", "every reply is malformed", "graded, agent limited by turns", lambda: shell("hello"), 1),
    Injection("model", "the engine dies", "the run ends: EngineDied", dead_engine, 0, 0),
    Injection(
        "environment", "a tool of its own raises", AT + "environment", lambda: struck(Guessing(), pg.play(["$ guess raise"])), gradings=0
    ),
    Injection("environment", "a tool of its own hangs", AT + "environment", hanging_tool, gradings=0),
    Injection("environment", "its side cannot finish", AT + "grader", unfinished_side, gradings=0),
    Injection("grader", "it raises", AT + "grader", own_grader("raise KeyError('answers')"), 1, 2),
    Injection("grader", "it ends its process with code 0", AT + "grader", own_grader("os._exit(0)"), 1, 2),
    Injection("grader", "it hangs", AT + "grader", own_grader("time.sleep(60)", grading_timeout_s=1.0), 1, 2),
    Injection("grader", "it returns nothing", AT + "grader", own_grader("return None"), 1, 2),
    Injection("grader", "it returns a bare number", AT + "grader", own_grader("return 1.0"), 1, 2),
    Injection("grader", "its reward is text", AT + "grader", own_grader("return Graded(reward='1', passed=True)"), 1, 2),
    Injection("grader", "its reward is not a number", AT + "grader", own_grader("return Graded(reward=float('nan'), passed=True)"), 1, 2),
    Injection("grader", "its reward is a list", AT + "grader", own_grader("return Graded(reward=[1.0], passed=True)"), 1, 2),
    Injection("grader", "it prints and then grades", "graded", own_grader("print('1.0'); return Graded(reward=0.5, passed=False)"), 1),
    Injection("judge", "it answers 500, which the grader catches", AT + "judge", asking("ask('error')"), 1, 2),
    Injection("judge", "it is busy once", "graded", asking("ask('once-busy')"), 1, 2),
    Injection("judge", "it does not answer", AT + "judge", asking("ask('hang')"), 1, 2),
    Injection("judge", "its reply is cut", AT + "judge", asking("ask('cut')"), 1, 2),
    Injection("judge", "its reply is no JSON", AT + "judge", asking("ask('html')"), 1, 2),
    Injection("judge", "it refuses the key", AT + "judge", asking("ask('denied')"), 1),
    Injection("judge", "the grader asks for one that it was not given", AT + "judge", asking("ask('yes', 'other')"), 1),
    Injection("tool server", "it dies during a call of the grader, which catches that", AT + "mcp", asking("use('die')"), 1, 2),
    Injection("tool server", "it does not answer", AT + "mcp", asking("use('hang')"), 1, 2),
)


def outcome(injection: Injection) -> Seen:
    """Runs it. Where it ends the run, that is its outcome."""
    try:
        return seen(injection.play())
    except (EngineDied, IsolationUnavailable, SandmillError) as error:
        return Seen(f"the run ends: {type(error).__name__}", 0, 0, False, False)


def document(rows: list[tuple[Injection, Seen]]) -> str:
    """The page."""
    lines = [
        "# What becomes of failures",
        "",
        "Made by `scripts/failures`: each fault is put into a real episode with real sandboxes and graders, which then joins a group of",
        "three sound ones. What breaks on the system's side has no reward: it is retried where that can help, and stays outside the pass",
        "rate, the group's baseline and the gradient. What the agent brings upon itself is graded. A grading that breaks is repeated on",
        "what the agent left; the episode is repeated only where that is lost. The tests run the same injections.",
        "",
        "| where | fault | comes to | attempts | gradings of the last | in the pass rate | in baseline and gradient |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(one, found))} |" for one, found in rows]
    return "\n".join(lines) + "\n"


def _cells(one: Injection, found: Seen) -> list[str]:
    counts = [str(count or "-") for count in (found.attempts, found.gradings)]
    return [one.where, one.what, found.label, *counts, _yes(found.in_pass_rate), _yes(found.in_training)]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def main() -> None:
    rows = [(one, outcome(one)) for one in INJECTIONS]
    DOCUMENT.write_text(document(rows))
    wrong = [f"{one.where}: {one.what}: {found.label}" for one, found in rows if found.label != one.label]
    print(f"{DOCUMENT.name}: {len(rows)} faults" + (f"; not as they must be: {'; '.join(wrong)}" if wrong else ""))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
