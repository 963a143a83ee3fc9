"""(seed, split, index) in, a `Problem` out: every random choice derives from these three, so a task can be made again anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from sandmill.environments.builtin.shell.families import GENERATORS, SIZES, Size, draft
from sandmill.environments.builtin.shell.options import Options
from sandmill.environments.builtin.shell.phrasings import PHRASINGS
from sandmill.environments.builtin.shell.problem import Problem
from sandmill.environments.builtin.shell.words import word_pools
from sandmill.errors import ConfigError

LARGEST_SPLIT: Final = 100_000
"""Tasks are made, all of them, when an environment is; so many take half a minute."""
_MOST_DRAWS: Final = 20
"""Draws for each task that is wanted; then there are hardly any others."""
_SIZES: Final = "spec.environment.trainTasks and heldOutTasks"


def problem_from(rng: random.Random, family: str, pool: Sequence[str], size: Size, split: str) -> Problem:
    """One problem of a family, in words of `pool` and a phrasing of `split`."""
    phrasing = rng.choice(PHRASINGS[family][split])
    return GENERATORS[family](draft(rng, pool, size), phrasing)


def problems(options: Options, split: str, count: int, seed: int) -> Iterator[tuple[int, Problem]]:
    """The first `count` problems of a split with their indices, families in turn. An identity that came before is skipped.

    Raises ConfigError where there are not as many.
    """
    if count > LARGEST_SPLIT:
        raise ConfigError(f"the shell environment makes at most {LARGEST_SPLIT:,} tasks of a split, not {count:,}", field=_SIZES)
    pool = word_pools(seed)[split]
    size = SIZES[options.difficulty]
    seen: set[str] = set()
    index = 0
    while len(seen) < count:
        family = options.families[len(seen) % len(options.families)]
        problem = problem_from(random.Random(f"shell:{seed}:{split}:{index}"), family, pool, size, split)
        if problem.identity not in seen:
            seen.add(problem.identity)
            yield index, problem
        elif index > _MOST_DRAWS * count:
            raise ConfigError(f"{', '.join(options.families)} have only about {len(seen)} different tasks; ask for fewer", field=_SIZES)
        index += 1
