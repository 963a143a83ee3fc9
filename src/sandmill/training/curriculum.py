"""Which tasks a step trains on: epochs over the train split, each in its own seeded order. In: step number; out: (group id, task) pairs.

The position is a function of the step alone, so a resumed run neither repeats nor skips a task.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from sandmill.environments.task import Task
from sandmill.rollouts.seeds import derive


def tasks_of_step(tasks: Sequence[Task], step: int, *, batch_size: int, seed: int) -> tuple[tuple[str, Task], ...]:
    """The tasks of `step` (0 for the first). A batch may straddle two epochs; group ids are `<step>-<place>`, counted from 1 and 0."""
    first = step * batch_size
    return tuple((f"{step + 1}-{place}", tasks[_index(first + place, len(tasks), seed)]) for place in range(batch_size))


def _index(position: int, size: int, seed: int) -> int:
    epoch, place = divmod(position, size)
    return _order(epoch, size, seed)[place]


@functools.lru_cache(maxsize=4)
def _order(epoch: int, size: int, seed: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(derive(seed, "order", epoch)).shuffle(order)
    return tuple(order)
