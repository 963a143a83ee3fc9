"""(seed, split, index) in, a `Problem` out: every random choice derives from these three, so a task can be made again anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from sandmill.environments.builtin.shell.families import GENERATORS, SIZES, Size, draft
from sandmill.environments.builtin.shell.options import Options
from sandmill.environments.builtin.shell.phrasings import PHRASINGS
from sandmill.environments.builtin.shell.problem import Problem
from sandmill.environments.builtin.shell.words import word_pools


def problem_from(rng: random.Random, family: str, pool: Sequence[str], size: Size, split: str) -> Problem:
    """One problem of a family, in words of `pool` and a phrasing of `split`."""
    phrasing = rng.choice(PHRASINGS[family][split])
    return GENERATORS[family](draft(rng, pool, size), phrasing)


def problems(options: Options, split: str, count: int, seed: int) -> Iterator[tuple[int, Problem]]:
    """The first `count` problems of a split with their indices, families in turn. An identity that came before is skipped."""
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
        index += 1
