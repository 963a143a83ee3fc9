"""The confused demonstrator: it shows a model how the dialogue works and what commands print, but hardly which command answers which
question. One dialogue in ten uses the right tool, three in ten a fixed wrong tool, the rest random ones; reinforcement learning has
to find the mapping.

Dialogue: `Q: <question>`, then `$ <command>` and one line of output, once or twice, then `= <answer>`; every line ends with a newline.
The answer is a random word of the last output, or the right one where the right tool printed it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from sandmill.environments.builtin.shell.evaluator import evaluate
from sandmill.environments.builtin.shell.families import COMMANDS, SIZES, Size
from sandmill.environments.builtin.shell.generate import problem_from
from sandmill.environments.builtin.shell.options import DEMO_FAMILIES, Options
from sandmill.environments.builtin.shell.problem import Problem
from sandmill.environments.builtin.shell.words import demonstration_pool
from sandmill.environments.demonstration import AGENT_WEIGHT, CONTEXT_WEIGHT, Demonstration, Segment
from sandmill.environments.observe import SEPARATOR, observation_line
from sandmill.errors import ConfigError

RIGHT_SHARE = 0.10
WRONG_SHARE = 0.30
WRONG_TOOL: Mapping[str, str] = dict(zip(DEMO_FAMILIES, (*DEMO_FAMILIES[1:], DEMO_FAMILIES[0]), strict=True))
"""Family -> the family whose command is its fixed wrong tool."""

_TEMPLATES = tuple(COMMANDS.values())


def demonstrations(options: Options, environment_seed: int, seed: int) -> Iterator[Demonstration]:
    """An endless stream drawn by `seed`, in the word pools of `environment_seed`.

    Raises ConfigError when none of the families has demonstrations.
    """
    families = tuple(family for family in options.families if family in DEMO_FAMILIES)
    if not families:
        raise ConfigError(f"only these families have demonstrations: {', '.join(DEMO_FAMILIES)}", field="options.families")
    return _stream(
        families,
        demonstration_pool(environment_seed),
        SIZES[options.difficulty],
        random.Random(f"demonstrations:{environment_seed}:{seed}"),
    )


def _stream(families: Sequence[str], pool: Sequence[str], size: Size, rng: random.Random) -> Iterator[Demonstration]:
    while True:
        yield _demonstration(rng, problem_from(rng, rng.choice(families), pool, size, "train"))


def _demonstration(rng: random.Random, problem: Problem) -> Demonstration:
    draw = rng.random()
    if draw < RIGHT_SHARE:
        return _right(problem)
    fixed = COMMANDS[WRONG_TOOL[problem.family]] if draw < RIGHT_SHARE + WRONG_SHARE else None
    segments = [Segment(f"Q: {problem.prompt}\n", CONTEXT_WEIGHT)]
    names = [problem.subject]
    words: list[str] = []
    for _ in range(rng.choice((1, 1, 2))):
        template = fixed or rng.choice(_TEMPLATES)
        shown = _call(segments, template.format(f=rng.choice(names), k=problem.key), problem)
        words = [word for word in shown.split() if word != SEPARATOR.strip()]
        names = [word for word in words if word in problem.files] or [problem.subject]
    segments.append(Segment(f"= {rng.choice(words)}\n", AGENT_WEIGHT))
    return Demonstration(tuple(segments))


def _right(problem: Problem) -> Demonstration:
    segments = [Segment(f"Q: {problem.prompt}\n", CONTEXT_WEIGHT)]
    for script in problem.solution:
        _call(segments, script, problem)
    segments.append(Segment(f"= {problem.answer}\n", AGENT_WEIGHT))
    return Demonstration(tuple(segments))


def _call(segments: list[Segment], script: str, problem: Problem) -> str:
    """Appends a command and what it shows; returns the latter."""
    output, exit_code = evaluate(script, problem.files)
    shown = observation_line(output, ok=exit_code == 0)
    segments += (Segment(f"$ {script}\n", AGENT_WEIGHT), Segment(f"{shown}\n", CONTEXT_WEIGHT))
    return shown
