"""Who may see which words and phrasings."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.builtin.shell.options import DEMO_FAMILIES, FAMILIES
from sandmill.environments.builtin.shell.phrasings import PHRASINGS, phrasing_words
from sandmill.environments.builtin.shell.words import SPLITS, WORDS, demonstration_pool, word_pools


def environment(seed=42, **options):
    return ShellEnvironment(EnvironmentSection(name="shell@1.0.0", train_tasks=120, held_out_tasks=60, seed=seed, options=options))


def words_of(problem_environment, split):
    """Every pool word in a split's prompts and folders."""
    text = " ".join(
        f"{task.prompt} {' '.join(problem_environment.files(task))} {b' '.join(problem_environment.files(task).values()).decode()}"
        for task in problem_environment.splits[split]
    )
    return {word.removesuffix(".txt") for word in text.split()} & set(WORDS)


@given(st.integers())
@settings(max_examples=50)
def test_word_pools_are_disjoint_and_cover_every_word(seed):
    pools = word_pools(seed)
    assert tuple(pools) == SPLITS
    assert sum(len(pool) for pool in pools.values()) == len(WORDS) == len(set().union(*pools.values()))
    assert min(len(pool) for pool in pools.values()) >= 30
    assert set(demonstration_pool(seed)) == set(WORDS) - set(pools["unseen"])


def test_pools_depend_on_the_seed():
    assert word_pools(1) == word_pools(1)
    assert set(word_pools(1)["heldout"]) != set(word_pools(2)["heldout"])


def test_no_word_contains_another():
    assert not [(a, b) for a, b in itertools.permutations(WORDS, 2) if a in b]


def test_no_pool_word_is_a_phrasing_word():
    assert not set(WORDS) & set().union(*(phrasing_words(split, FAMILIES) for split in SPLITS))


@pytest.mark.parametrize("seed", [0, 42])
def test_splits_use_only_their_own_words(seed):
    shell = environment(seed)
    pools = word_pools(seed)
    for split in SPLITS:
        assert words_of(shell, split) <= set(pools[split])
    assert words_of(shell, "train").isdisjoint(words_of(shell, "heldout"))


def test_demonstrations_never_show_an_unseen_word():
    unseen = set(word_pools(42)["unseen"])
    texts = [demonstration.text for demonstration in itertools.islice(environment().demonstrations(3), 4000)]
    seen = {word.removesuffix(".txt") for text in texts for word in text.split()}
    assert not seen & unseen
    assert set(demonstration_pool(42)) <= seen


@pytest.mark.parametrize("family", FAMILIES)
def test_phrasings_of_different_splits_are_different(family):
    templates = [template for split in SPLITS for template in PHRASINGS[family][split]]
    assert len(templates) == len(set(templates))
    assert set(PHRASINGS[family]) == set(SPLITS)


@pytest.mark.parametrize("split", ["tuning", "heldout", "unseen"])
def test_held_out_phrasings_are_made_of_known_words(split):
    assert phrasing_words(split, DEMO_FAMILIES) <= phrasing_words("train", DEMO_FAMILIES)


def test_demonstrations_use_training_phrasings_only():
    def shape(prompt):
        return " ".join("*" if word.removesuffix(".txt") in WORDS else word for word in prompt.split())

    templates = [template for family in DEMO_FAMILIES for split in SPLITS[1:] for template in PHRASINGS[family][split]]
    held_out = {shape(template.format(f="acorn.txt", k="amber")) for template in templates}
    shown = {shape(d.segments[0].text.removeprefix("Q: ").strip()) for d in itertools.islice(environment().demonstrations(3), 4000)}
    assert not shown & held_out
    assert len(shown) == sum(len(PHRASINGS[family]["train"]) for family in DEMO_FAMILIES)
