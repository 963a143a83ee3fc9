"""Tasks and what solves each in; demonstrations of a confused demonstrator out: it shows how a dialogue goes, and seldom what is right.

A warm start on them teaches the mechanics: a reply has this form, answers look like these. Which belongs to which task, the policy learns
from the reward. One dialogue in ten is right unless more are asked for; the others end as another task's would.

A small model may need more: where no reply is right but by luck, there is little for a reward to find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from sandmill.environments.demonstration import AGENT_WEIGHT, CONTEXT_WEIGHT, Demonstration, Segment
from sandmill.environments.observe import observation_line
from sandmill.environments.task import Task

RIGHT = 0.1
"""The share of demonstrations that solve their task."""


def confused(tasks: Sequence[Task], lines: Callable[[Task], Sequence[str]], seed: int, right: float = RIGHT) -> Iterator[Demonstration]:
    """An endless stream, of which about the share `right` solves its task.

    `lines` of a task: what an agent that solves it writes (`$ command`, `= answer`) and reads, in turn.
    """
    pick = random.Random(f"demonstrations:{seed}")
    shown = [(_question(task), tuple(lines(task))) for task in tasks]
    while True:
        prompt, solved = pick.choice(shown)
        played = solved if pick.random() < right else pick.choice(shown)[1]
        segments = (Segment(f"{observation_line(line)}\n", _weight(line)) for line in played)
        yield Demonstration(segments=(Segment(prompt, CONTEXT_WEIGHT), *segments))


def _question(task: Task) -> str:
    said = "\n".join(message.text for message in task.opening)
    return f"Q: {observation_line(said)}\n"


def _weight(line: str) -> float:
    return AGENT_WEIGHT if line.startswith(("$", "=")) else CONTEXT_WEIGHT
