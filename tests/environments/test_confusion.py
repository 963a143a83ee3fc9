"""The confused demonstrator: right one time in ten, in the form of an episode always."""

from __future__ import annotations

import itertools

import pytest

from sandmill.environments.confusion import confused
from sandmill.environments.task import Task
from sandmill.models.chat import Answer, Call
from sandmill.models.line_dialogue import LineDialogue
from sandmill.models.model import StopReason
from sandmill.models.tiny import character_tokenizer

TASKS = [Task(id=str(number), prompt=f"what is\n{number} + 1 ?", identity=str(number)) for number in range(50)]


def lines(task: Task) -> tuple[str, ...]:
    return (f"$ expr {task.id} + 1", str(int(task.id) + 1), f"= {int(task.id) + 1}")


def test_it_is_right_as_often_as_it_says_and_the_same_again() -> None:
    made = list(itertools.islice(confused(TASKS, lines, 7), 4000))
    assert made[:100] == list(itertools.islice(confused(TASKS, lines, 7), 100))
    right = {(f"Q: what is ; {task.id} + 1 ?\n", f"= {int(task.id) + 1}\n") for task in TASKS}
    share = sum((one.segments[0].text, one.segments[-1].text) in right for one in made) / len(made)
    assert 0.09 < share < 0.15


@pytest.mark.parametrize(("right", "least", "most"), [(0.5, 0.46, 0.56), (1.0, 1.0, 1.0)])
def test_it_is_right_as_often_as_asked_for(right: float, least: float, most: float) -> None:
    made = itertools.islice(confused(TASKS, lines, 7, right), 4000)
    solved = {(f"Q: what is ; {task.id} + 1 ?\n", f"= {int(task.id) + 1}\n") for task in TASKS}
    share = sum((one.segments[0].text, one.segments[-1].text) in solved for one in made) / 4000
    assert least <= share <= most


def test_what_is_shown_is_what_an_episode_would_write() -> None:
    tokenizer = character_tokenizer()
    dialogue = LineDialogue(tokenizer, context_length=256)
    one = next(confused(TASKS, lines, 0))
    ids, weights = dialogue.encode_segments(one.segments)
    assert ids[: len(one.segments[0].text)] == list(tokenizer.encode(one.segments[0].text, add_special_tokens=False))
    spoken = [segment for segment in one.segments if segment.weight == 1.0]
    actions = [dialogue.parse(tokenizer.encode(segment.text, add_special_tokens=False), StopReason.STOP)[0] for segment in spoken]
    assert [type(action) for action in actions] == [Call, Answer]
    assert len(ids) == len(weights)
