"""Rows become tasks in splits that share nothing; what is wrong with a row is named before anything is sampled."""

import asyncio
import json

import msgspec
import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.drawing import draw, gives_away, text_of
from sandmill.environments.packages.protocol import Description, Message, Row
from sandmill.errors import ConfigError


def row(prompt, **more):
    return Row(prompt=prompt, row=msgspec.Raw(json.dumps({"prompt": str(prompt)}).encode()), **more)


def drawn(splits, train=2, held_out=1, seed=0, leave_out=(), **options):
    """Draws from rows by split; a function instead of a list makes a split without end."""
    counts = {name: None if callable(rows) else len(rows) for name, rows in splits.items()}
    section = EnvironmentSection(name="x", train_tasks=train, held_out_tasks=held_out, seed=seed, leave_out=tuple(leave_out))

    async def fetch(split, start, stop):
        rows = splits[split]
        return [rows(number) for number in range(start, stop)] if callable(rows) else rows[start:stop]

    allow = options.pop("allow_answers", False)
    description = Description(name="x", version="1", splits=counts)
    return asyncio.run(draw(description, section, fetch, "data.parquet", allow_answers=allow, **options))


def prompts(splits):
    return {name: [one.task.prompt for one in rows] for name, rows in splits.items()}


def test_one_pool_is_cut_in_two_by_seed():
    pool = [row(f"question {number}") for number in range(100)]
    first, again, other = (drawn({"train": pool}, 10, 5, seed) for seed in (1, 1, 2))
    assert prompts(first) == prompts(again) != prompts(other)
    assert (len(first["train"]), len(first["heldout"])) == (10, 5)
    assert not {one.task.identity for one in first["train"]} & {one.task.identity for one in first["heldout"]}


def test_rows_of_the_same_identity_never_come_on_both_sides():
    pool = [row(f"phrasing {number}", identity=str(number % 6)) for number in range(60)]
    splits = drawn({"train": pool}, 3, 3)
    assert {one.row.identity for one in splits["train"]} | {one.row.identity for one in splits["heldout"]} == set("012345")


@pytest.mark.parametrize("name", ["test", "validation", "eval", "heldout", "dev"])
def test_a_package_with_a_held_out_split_keeps_it(name):
    splits = drawn({"train": [row(f"a{n}") for n in range(5)], name: [row(f"b{n}") for n in range(5)]})
    assert {text[0] for text in prompts(splits)["train"]} == {"a"}
    assert {text[0] for text in prompts(splits)["heldout"]} == {"b"}


def test_a_leak_between_the_splits_of_a_package_is_refused():
    with pytest.raises(ConfigError, match="leaks"):
        drawn({"train": [row("same"), row("other")], "test": [row("same")]})


def test_splits_without_end_leave_out_what_was_seen():
    splits = drawn({"train": lambda n: row(f"sum {n % 40}"), "heldout": lambda n: row(f"sum {n % 7}")}, 33, 7)
    assert len({text for rows in prompts(splits).values() for text in rows}) == 40


def test_tasks_that_are_left_out_are_not_drawn_and_have_to_be_there():
    endless = drawn({"train": lambda n: row(f"a{n}"), "test": lambda n: row(f"b{n}")}, 2, 2, leave_out=["train-000001"])
    assert prompts(endless) == {"train": ["a0", "a2"], "heldout": ["b0", "b1"]}
    pool = [row(f"a{n}") for n in range(4)]
    assert "a2" not in str(prompts(drawn({"train": pool}, 2, 1, leave_out=["train-000002"])))
    with pytest.raises(ConfigError, match="there is no task 'train-00002'; did you mean 'train-000002'"):
        drawn({"train": pool}, 2, 1, leave_out=["train-00002"])


def test_a_generator_with_too_few_different_tasks_is_refused():
    with pytest.raises(ConfigError, match="only 5 different tasks for split train, not 9: ask for fewer"):
        drawn({"train": lambda n: row(f"t{n % 5}"), "heldout": lambda n: row(f"h{n}")}, 9, 1)


def test_too_few_rows_name_the_field():
    with pytest.raises(ConfigError, match=r"spec.environment.trainTasks: data.parquet: .* only 2 different ones"):
        drawn({"train": [row("a"), row("b")]}, 2, 1)


def test_fewer_tasks_fit_when_asked_to():
    splits = drawn({"train": [row(f"{n}") for n in range(6)]}, 50, 50, fit=True)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 4, "heldout": 2}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("a", id="1"), row("b", id="1")], r"data.parquet: split 'train', row 1: field 'id' is '1', as in split 'train', row 0"),
        ([row("a"), row("b", id="../../etc/passwd")], r"row 1: field 'id' is '../../etc/passwd', a path"),
        ([row("a"), row("b", id="--help")], r"row 1: field 'id' is '--help'"),
        ([row("a"), row("b", id="x\x1b[2J")], r"row 1: field 'id' is 'x\\x1b\[2J'"),
        ([row("a"), row("  ")], r"row 1: field 'prompt' is empty"),
        ([row("a"), row("2+2? Answer: 4", answer="4")], r"row 1: field 'prompt' ends with the answer"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(rows, said):
    with pytest.raises(ConfigError, match=said):
        drawn({"train": [*rows, row("c")]})


def test_answers_in_prompts_can_be_allowed():
    rows = [row(f"{n}+0? Answer: {n}", answer=str(n)) for n in range(3)]
    assert len(drawn({"train": rows}, allow_answers=True)["train"]) == 2


@pytest.mark.parametrize(
    ("prompt", "answer", "leaks"),
    [
        ("What is 8 * 9? #### 72", "#### 72", True),
        ("Solve.\nGround truth: \\frac{1}{2}\n", "\\boxed{\\frac{1}{2}}", True),
        ("Solve. The answer is 5.", "<answer>5</answer>", True),
        ("Is it A or B? Answer with the letter.", "A", False),
        ("What is 7 + 0?", "7", False),
        ("Example: 1+1? Answer: 2\nNow: what is 3-1?", "2", False),
        ("How many letters has 'answer'?", "6", False),
    ],
)
def test_only_a_labelled_answer_at_the_end_gives_it_away(prompt, answer, leaks):
    assert gives_away(prompt, answer) is leaks


def test_messages_become_one_text():
    assert text_of([Message("system", "Be short."), Message("user", "Why?")]) == "Be short.\n\nWhy?"
    assert (
        text_of([Message("user", "1+1?"), Message("assistant", "2"), Message("user", "2+2?")]) == "user: 1+1?\n\nassistant: 2\n\nuser: 2+2?"
    )


def test_ids_are_our_own_and_the_packages_are_metadata():
    (one,) = drawn({"train": [row("a", id="foreign"), row("b")]}, 1, 1, seed=0)["train"]
    assert one.task.id.startswith("train-00000")
    assert one.task.metadata["split"] == "train"
