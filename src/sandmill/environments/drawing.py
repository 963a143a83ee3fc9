"""A package's rows in; tasks in splits that share nothing out, each beside the row that grades it. What is wrong is named by row and field.

A split that never ends is taken from its start, leaving out what was seen before. One that ends is read whole and drawn from by seed, so
that duplicates, and identities on both sides, are found before anything is sampled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.packages.protocol import Description, Message, Row
from sandmill.environments.splits import check_left_out, check_splits, split_tasks
from sandmill.environments.task import Task
from sandmill.errors import ConfigError

HELD_OUT: Final[tuple[str, ...]] = ("heldout", "test", "validation", "eval", "dev")
"""What packages call the split that is not trained on, the first that there is."""
MOST_ROWS: Final = 200_000
PAGE: Final = 500
_MOST_MISSES: Final = 20
"""Rows of an endless split that were seen before, per new one, until it counts as exhausted."""
_LONGEST_ID: Final = 200
_LONGEST_PROMPT: Final = 1 << 20
_TAIL: Final = 40
_LABEL: Final = r"(?:answer|solution|ground[ _]?truth|label|target|expected|####)\W{0,6}(?:is\W{1,3})?"

Fetch = Callable[[str, int, int], Awaitable[Sequence[Row]]]
"""Rows of a split, from one number up to another."""


class Drawn(NamedTuple):
    """One task, and how to grade it."""

    task: Task
    row: Row


async def draw(
    description: Description, section: EnvironmentSection, fetch: Fetch, source: str, *, allow_answers: bool, fit: bool = False
) -> dict[str, tuple[Drawn, ...]]:
    """Splits `train` and `heldout` of the sizes that the section asks for. Raises ConfigError naming `source`, row and field.

    `fit`: smaller ones where there are fewer tasks.
    """
    reader = _Reader(fetch, source, allow_answers, frozenset(section.leave_out))
    names = _names(description, source)
    sizes = {"train": section.train_tasks, "heldout": section.held_out_tasks}
    splits: dict[str, tuple[Drawn, ...]] = {}
    if len(set(names.values())) == 1:  # one pool for both
        pool = names["train"]
        count = description.splits[pool]
        rows = await reader.endless(pool, sum(sizes.values()), set(), fit) if count is None else await reader.whole(pool, count)
        splits = _drawn(rows, _fitting(rows, sizes) if fit else sizes, section.seed, source)
    else:
        seen: set[str] = set()
        for split in ("heldout", "train"):
            count = description.splits[names[split]]
            if count is None:
                splits[split] = tuple(await reader.endless(names[split], sizes[split], seen, fit))
            else:
                rows = await reader.whole(names[split], count)
                size = {split: sizes[split]}
                splits |= _drawn(rows, _fitting(rows, size) if fit else size, section.seed, source)
            seen |= {one.task.identity for one in splits[split]}
    check_left_out(section, reader.met)
    check_splits({name: [one.task for one in drawn] for name, drawn in splits.items()}, source)
    return {"train": splits["train"], "heldout": splits["heldout"]}


def _names(description: Description, source: str) -> Mapping[str, str]:
    """The package's names for what is trained on and what is held out."""
    found = [name for name, count in description.splits.items() if count is None or count > 0]
    if not found:
        raise ConfigError("has no tasks in any split", file=source)
    held_out = next((name for name in HELD_OUT if name in found), None)
    train = "train" if "train" in found else held_out or found[0]
    return {"train": train, "heldout": held_out or train}


def _drawn(rows: Sequence[Drawn], sizes: Mapping[str, int], seed: int, source: str) -> dict[str, tuple[Drawn, ...]]:
    by_id = {one.task.id: one for one in rows}
    try:
        chosen = split_tasks([one.task for one in rows], sizes, seed)
    except ConfigError as error:
        field = "spec.environment.trainTasks" if "train" in sizes else "spec.environment.heldOutTasks"
        raise ConfigError(f"{source}: {error.message}", field=field) from None
    return {name: tuple(by_id[task.id] for task in tasks) for name, tasks in chosen.items()}


def _fitting(rows: Sequence[Drawn], sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that the rows suffice for: of a pool for both, at most a third is held out."""
    count = len({one.task.identity for one in rows})
    if len(sizes) == 1:
        return {name: min(size, count) for name, size in sizes.items()}
    held_out = min(sizes["heldout"], max(1, count // 3))
    return {"train": min(sizes["train"], count - held_out), "heldout": held_out}


class _Reader:
    """Rows as tasks, every one checked."""

    def __init__(self, fetch: Fetch, source: str, allow_answers: bool, left_out: frozenset[str]) -> None:
        self._fetch = fetch
        self._source = source
        self._allow_answers = allow_answers
        self._left_out = left_out
        self._ids: dict[str, str] = {}
        self.met: set[str] = set()
        """Ids of all tasks so far."""

    async def whole(self, split: str, count: int) -> list[Drawn]:
        """All rows of a split."""
        if count > MOST_ROWS:
            raise ConfigError(f"split {split!a} has {count} rows, and at most {MOST_ROWS} are read; cut it", file=self._source)
        found: list[Drawn] = []
        for start in range(0, count, PAGE):
            rows = await self._fetch(split, start, min(start + PAGE, count))
            if len(rows) != min(PAGE, count - start):
                raise ConfigError(f"split {split!a} promises {count} rows and ends after {start + len(rows)}", file=self._source)
            found += [self._task(split, start + index, row) for index, row in enumerate(rows)]
        return [one for one in found if one.task.id not in self._left_out]

    async def endless(self, split: str, wanted: int, seen: set[str], fit: bool) -> list[Drawn]:
        """The first rows whose identities are new; with `fit`, as many as there are."""
        found: list[Drawn] = []
        seen, number, least = set(seen), 0, wanted + _MOST_MISSES
        while len(found) < wanted and number < wanted * _MOST_MISSES + least:
            stop = number + min(PAGE, max(8, wanted - len(found)))
            rows = await self._fetch(split, number, stop)
            if not rows:
                break
            for index, row in enumerate(rows):
                one = self._task(split, number + index, row)
                if one.task.identity not in seen and one.task.id not in self._left_out and len(found) < wanted:
                    seen.add(one.task.identity)
                    found.append(one)
            number += len(rows)
        if len(found) < wanted and not (fit and found):
            field = "spec.environment.trainTasks" if split == "train" else "spec.environment.heldOutTasks"
            raise ConfigError(
                f"{self._source} makes only {len(found)} different tasks for split {split}, not {wanted}: ask for fewer", field=field
            )
        return found

    def _task(self, split: str, number: int, row: Row) -> Drawn:
        place = f"split {split!a}, row {number}"
        prompt = text_of(row.prompt)
        if not prompt.strip():
            raise ConfigError(f"{place}: field 'prompt' is empty", file=self._source)
        if len(prompt) > _LONGEST_PROMPT:
            raise ConfigError(f"{place}: field 'prompt' has {len(prompt)} characters, more than {_LONGEST_PROMPT}", file=self._source)
        if row.id is not None:
            self._check_id(row.id, place)
        if not self._allow_answers and row.answer and gives_away(prompt, row.answer):
            raise ConfigError(
                f"{place}: field 'prompt' ends with the answer; take it out, or set options.allowAnswersInPrompts", file=self._source
            )
        identity = row.identity or prompt
        metadata = {**row.metadata, "split": split, **({} if row.id is None else {"id": row.id})}
        task = Task(
            id=f"{split}-{number:06d}",
            prompt=prompt,
            identity=hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32],
            metadata=metadata,
        )
        self.met.add(task.id)
        return Drawn(task, row)

    def _check_id(self, id: str, place: str) -> None:
        if not id or len(id) > _LONGEST_ID or not id.isprintable() or "/" in id or "\\" in id or id.startswith((".", "-")):
            raise ConfigError(
                f"{place}: field 'id' is {id[:80]!a}, a path or an option to other programs; name tasks plainly", file=self._source
            )
        first = self._ids.setdefault(id, place)
        if first != place:
            raise ConfigError(f"{place}: field 'id' is {id[:80]!a}, as in {first}; ids must differ", file=self._source)


def text_of(prompt: str | Sequence[Message]) -> str:
    """A prompt as one text. Of messages, roles are written where it is not simply an instruction and a question."""
    if isinstance(prompt, str):
        return prompt
    roles = [message.role for message in prompt]
    if roles in (["user"], ["system", "user"]):
        return "\n\n".join(message.content for message in prompt if message.content)
    return "\n\n".join(f"{message.role}: {message.content}" for message in prompt)


def gives_away(prompt: str, answer: str) -> bool:
    """Whether a prompt ends with its own answer, labelled as such: `... #### 72`."""
    bare = answer.strip()
    for tag in (r"<answer>(.*)</answer>", r"\\boxed\{(.*)\}", r"####\s*(.*)", r"Answer:\s*(.*)"):
        if match := re.fullmatch(tag, bare, re.DOTALL):
            bare = match[1].strip()
    if not bare or len(bare) > 2000:
        return False
    tail = prompt.rstrip()[-(len(bare) + _TAIL + 40) :]
    return re.search(rf"{_LABEL}{re.escape(bare)}\W{{0,12}}$", tail, re.IGNORECASE) is not None
