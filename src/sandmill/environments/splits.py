"""A pool of tasks or words and a seed in; named splits out that share no identity. A leak is refused, never repaired in silence."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from sandmill.config.check import nearest
from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.task import Task
from sandmill.errors import ConfigError

REQUIRED = ("train", "heldout")
LEFT_OUT = "spec.environment.leaveOut"
T = TypeVar("T")


def partition(items: Sequence[str], shares: Mapping[str, float], seed: int) -> dict[str, tuple[str, ...]]:
    """Cuts distinct `items` into disjoint parts of the given shares (they add up to at most 1), in an order drawn by `seed`.

    A part gets `floor(share * len(items))` items; the last part also gets what rounding left when the shares add up to 1.
    """
    if len(set(items)) != len(items):
        raise ValueError("the items of a partition must be distinct")
    if sum(shares.values()) > 1 + 1e-9 or any(share < 0 for share in shares.values()):
        raise ValueError(f"the shares of a partition must be at least 0 and add up to at most 1, not {dict(shares)}")
    order = sorted(items)
    random.Random(f"partition:{seed}").shuffle(order)
    parts: dict[str, tuple[str, ...]] = {}
    start, last = 0, list(shares)[-1]
    whole = sum(shares.values()) > 1 - 1e-9
    for name, share in shares.items():
        stop = len(order) if whole and name == last else start + int(share * len(order) + 1e-9)
        parts[name] = tuple(order[start:stop])
        start = stop
    return parts


def split_tasks(tasks: Sequence[Task], sizes: Mapping[str, int], seed: int) -> dict[str, tuple[Task, ...]]:
    """Draws splits of the given sizes from a fixed pool, by seed and by identity.

    Tasks of one identity all go to one split or are left out. The draw depends on identities and seed only, not on the pool's
    order. Raises ConfigError when the pool has too few identities.
    """
    by_identity: dict[str, list[Task]] = {}
    for task in tasks:
        by_identity.setdefault(task.identity, []).append(task)
    order = sorted(by_identity, key=lambda identity: (_draw(seed, identity), identity))
    if sum(sizes.values()) > len(order):
        wanted = " and ".join(f"{size} {name}" for name, size in sizes.items())
        raise ConfigError(f"{wanted} tasks were asked for, but there are only {len(order)} different ones: ask for fewer")
    splits: dict[str, tuple[Task, ...]] = {}
    start = 0
    for name, size in sizes.items():
        splits[name] = tuple(sorted(by_identity[identity], key=lambda task: task.id)[0] for identity in order[start : start + size])
        start += size
    return splits


def draw(tasks: Sequence[Task], section: EnvironmentSection) -> dict[str, tuple[Task, ...]]:
    """`train` and `heldout` of a pool that is as large as it is. Where the section says nothing of sizes, two thirds are for training.

    Raises ConfigError when it asks for more than there are.
    """
    count = len({task.identity for task in tasks})
    sizes = {"train": section.train_tasks, "heldout": section.held_out_tasks}
    unsaid = EnvironmentSection(name=section.name)
    if sum(sizes.values()) > count and (section.train_tasks, section.held_out_tasks) == (unsaid.train_tasks, unsaid.held_out_tasks):
        sizes = {"train": count - count // 3, "heldout": count // 3}
    return split_tasks(tasks, sizes, section.seed)


def kept(tasks: Mapping[str, T], section: EnvironmentSection) -> dict[str, T]:
    """Tasks by id, without those that the section leaves out. Raises ConfigError for an id that is none, or when nothing is left."""
    check_left_out(section, tasks)
    found = {id: task for id, task in tasks.items() if id not in section.leave_out}
    if not found:
        raise ConfigError("leaves no task", field=LEFT_OUT)
    return found


def check_left_out(section: EnvironmentSection, ids: Collection[str]) -> None:
    """Raises ConfigError naming the nearest when the section leaves out a task that is not there."""
    for one in section.leave_out:
        if one not in ids:
            near = nearest(one, ids)
            hint = f"did you mean {near!r}?" if near else f"there are {len(ids)}"
            raise ConfigError(f"there is no task {one[:80]!r}; {hint}", field=LEFT_OUT)


def check_splits(splits: Mapping[str, Sequence[Task]], environment: str) -> None:
    """Refuses (ConfigError) a missing split, an ill-formed task, a repeated id, or an identity in two splits."""
    for name in REQUIRED:
        if name not in splits:
            found = ", ".join(sorted(splits)) or "none"
            raise ConfigError(f"environment {environment} has no split {name!r}; it has: {found}")
    ids: dict[str, str] = {}
    owners: dict[str, tuple[str, str]] = {}
    for name, tasks in splits.items():
        for row, task in enumerate(tasks):
            _check_task(task, f"environment {environment}, split {name}, task {row}")
            if task.id in ids:
                raise ConfigError(
                    f"environment {environment}: task id {task.id!r} is in split {ids[task.id]} and again in {name}, row {row}"
                )
            ids[task.id] = name
            owner = owners.setdefault(task.identity, (name, task.id))
            if owner[0] != name:
                raise ConfigError(
                    f"environment {environment} leaks: identity {task.identity!r} is in split {owner[0]} (task {owner[1]!r}) "
                    f"and in split {name} (task {task.id!r})"
                )


def _check_task(task: object, place: str) -> None:
    if not isinstance(task, Task):
        raise ConfigError(f"{place}: expected a Task, found {type(task).__name__}")
    for field in ("id", "prompt", "identity"):
        value = getattr(task, field)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{place}: {field} must be a non-empty string, found {ascii(value)[:60]}; it has id {ascii(task.id)[:60]}")


def _draw(seed: int, identity: str) -> bytes:
    return hashlib.sha256(f"{seed}:{identity}".encode("utf-8", "surrogatepass")).digest()
