"""Splits: seeded, disjoint by identity, and a leak is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.environments.splits import check_splits, partition, split_tasks
from sandmill.environments.task import Task
from sandmill.errors import ConfigError


def task(number, identity=None):
    return Task(id=f"t{number}", prompt="?", identity=identity or f"i{number}")


@given(st.sets(st.text(max_size=4), min_size=1, max_size=60), st.integers(), st.floats(0, 1))
def test_a_partition_is_disjoint_complete_and_independent_of_order(words, seed, share):
    shares = {"a": share, "b": 1 - share}
    parts = partition(sorted(words), shares, seed)
    assert sorted(parts["a"] + parts["b"]) == sorted(words)
    assert partition(sorted(words, reverse=True), shares, seed) == parts


@pytest.mark.parametrize("shares", [{"a": 0.7, "b": 0.6}, {"a": -0.1}])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        partition(["x", "y"], shares, 0)


def test_repeated_items_are_refused():
    with pytest.raises(ValueError, match="distinct"):
        partition(["x", "x"], {"a": 1.0}, 0)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.integers(), st.data())
def test_drawn_splits_share_no_identity_and_do_not_depend_on_the_pools_order(identities, seed, data):
    pool = [task(number, f"i{identity}") for number, identity in enumerate(identities)]
    different = len(set(identities))
    train = data.draw(st.integers(0, different))
    sizes = {"train": train, "heldout": different - train}
    splits = split_tasks(pool, sizes, seed)
    assert {name: len(tasks) for name, tasks in splits.items()} == sizes
    assert not {t.identity for t in splits["train"]} & {t.identity for t in splits["heldout"]}
    shuffled = random.Random(1).sample(pool, len(pool))
    assert split_tasks(shuffled, sizes, seed) == splits


def test_21_train_and_43_held_out_tasks_by_seed_42():
    pool = [task(number) for number in range(64)]
    splits = split_tasks(pool, {"train": 21, "heldout": 43}, 42)
    check_splits(splits, "e@1.0.0")
    assert {t.id for t in splits["train"]} != {t.id for t in split_tasks(pool, {"train": 21, "heldout": 43}, 43)["train"]}


def test_too_few_tasks_is_one_clear_sentence():
    with pytest.raises(ConfigError, match="3 train and 2 heldout tasks were asked for, but there are only 4 different ones"):
        split_tasks([task(number) for number in range(4)], {"train": 3, "heldout": 2}, 0)


def test_a_leak_is_refused_with_both_places_named():
    splits = {"train": [task(1), task(2, "same")], "heldout": [task(3, "same")]}
    with pytest.raises(ConfigError, match=r"leaks: identity 'same' is in split train \(task 't2'\) and in split heldout \(task 't3'\)"):
        check_splits(splits, "e@1.0.0")


def test_a_repeated_id_is_refused():
    with pytest.raises(ConfigError, match="task id 't1' is in split train and again in heldout, row 0"):
        check_splits({"train": [task(1)], "heldout": [task(1, "other")]}, "e@1.0.0")


def test_the_same_identity_twice_in_one_split_is_no_leak():
    check_splits({"train": [task(1, "a"), task(2, "a")], "heldout": [task(3)]}, "e@1.0.0")


def test_a_missing_split_names_those_there_are():
    with pytest.raises(ConfigError, match="no split 'heldout'; it has: test, train"):
        check_splits({"train": [task(1)], "test": [task(2)]}, "e@1.0.0")


@pytest.mark.parametrize("field", ["id", "prompt", "identity"])
def test_an_empty_field_is_refused_with_split_and_row(field):
    fields = {"id": "t", "prompt": "?", "identity": "i"} | {field: ""}
    with pytest.raises(ConfigError, match=rf"split heldout, task 1: {field} must be a non-empty string"):
        check_splits({"train": [task(1)], "heldout": [task(2), Task(**fields)]}, "e@1.0.0")


def test_something_that_is_no_task_is_refused():
    with pytest.raises(ConfigError, match="split train, task 0: expected a Task, found dict"):
        check_splits({"train": [{"prompt": "?"}], "heldout": []}, "e@1.0.0")
