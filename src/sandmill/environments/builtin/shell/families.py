"""The task families: a random source, a word pool and a phrasing in; a `Problem` out.

The six demonstration families share one shape of folder, and each is solved by exactly one of the six commands in `COMMANDS`: numbers
are drawn so that no other command happens to print the answer (counts of lines, counts of files, sums and values have disjoint
ranges). The one unavoidable overlap is `cat`, which shows a looked-up value or a last line among the file's other words.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sandmill.environments.builtin.shell.options import Difficulty
from sandmill.environments.builtin.shell.problem import HiddenRun, Problem

COMMANDS: Mapping[str, str] = {
    "lines": "wc -l {f}",
    "files": "ls | wc -l",
    "read": "grep {k} {f}",
    "hop": "cat {f}",
    "sum": "awk '{{s+=$2}}END{{print s}}' {f}",
    "last": "tail -n 1 {f}",
}
"""Demonstration family -> its one right command."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Inclusive ranges of a difficulty. Counts of lines stay below counts of files, and both below the smallest value."""

    files: tuple[int, int]
    lines: tuple[int, int]
    rows: tuple[int, int]
    """Rows of a table to sum."""
    keys: int
    """Rows of a table to look something up in."""
    values: tuple[int, int]
    """Looked-up values; sums are at least the lowest of them too."""
    references: int


SIZES: Mapping[Difficulty, Size] = {
    Difficulty.EASY: Size(files=(6, 9), lines=(2, 5), rows=(2, 3), keys=3, values=(10, 43), references=1),
    Difficulty.MEDIUM: Size(files=(10, 14), lines=(4, 9), rows=(4, 6), keys=6, values=(15, 99), references=2),
    Difficulty.HARD: Size(files=(21, 26), lines=(8, 20), rows=(8, 12), keys=10, values=(30, 99), references=3),
}
HIGHEST_SUM = 90


class Draft(msgspec.Struct, kw_only=True):
    """A folder being filled: distinct words, the files named by the first of them, and spare words that name no file."""

    rng: random.Random
    pool: Sequence[str]
    size: Size
    names: list[str]
    spare: list[str]
    files: dict[str, str]


def draft(rng: random.Random, pool: Sequence[str], size: Size) -> Draft:
    """A folder of one-word-a-line files."""
    count = rng.randint(*size.files)
    words = rng.sample(pool, count + 4)
    names = [f"{word}.txt" for word in words[:count]]
    low, high = size.lines
    files = {name: text_of(rng.sample(pool, rng.randint(low, high))) for name in names}
    return Draft(rng=rng, pool=pool, size=size, names=names, spare=words[count:], files=files)


def text_of(lines: Sequence[str]) -> str:
    """File content: every line ends with a newline, as `wc -l` counts."""
    return "\n".join(lines) + "\n"


def lines(d: Draft, phrasing: str) -> Problem:
    """How many lines a file has."""
    f = d.names[0]
    answer = str(d.files[f].count("\n"))
    return _simple(d, "lines", phrasing, answer)


def files(d: Draft, phrasing: str) -> Problem:
    """How many files the folder has."""
    return _simple(d, "files", phrasing, str(len(d.files)))


def read(d: Draft, phrasing: str) -> Problem:
    """The value beside a key; the key is never that of the last line, which `tail` would print."""
    keys = d.rng.sample(d.pool, d.size.keys)
    lowest, highest = d.size.values
    values = d.rng.sample(range(lowest, highest + 1), d.size.keys)
    d.files[d.names[0]] = text_of([f"{key} {value}" for key, value in zip(keys, values, strict=True)])
    chosen = d.rng.randrange(d.size.keys - 1)
    return _simple(d, "read", phrasing, str(values[chosen]), key=keys[chosen])


def sum_(d: Draft, phrasing: str) -> Problem:
    """The sum of a column of positive numbers, larger than each of them."""
    rows = d.rng.randint(*d.size.rows)
    lowest = -(-d.size.values[0] // rows)
    values = [d.rng.randint(lowest, HIGHEST_SUM // rows) for _ in range(rows)]
    d.files[d.names[0]] = text_of([f"{key} {value}" for key, value in zip(d.rng.sample(d.pool, rows), values, strict=True)])
    return _simple(d, "sum", phrasing, str(sum(values)))


def last(d: Draft, phrasing: str) -> Problem:
    """The last line of a file of at least three, so that a random word of the whole file is mostly wrong."""
    count = d.rng.randint(max(3, d.size.lines[0]), d.size.lines[1])
    words = d.rng.sample(d.pool, count)
    d.files[d.names[0]] = text_of(words)
    return _simple(d, "last", phrasing, words[-1])


def hop(d: Draft, phrasing: str) -> Problem:
    """A file names another one; its first line is the answer. At higher difficulties the references form a chain."""
    chain = d.names[: d.size.references + 1]
    for name, target in itertools.pairwise(chain):
        d.files[name] = text_of([target, d.spare[0]])
    answer = str(d.rng.randrange(d.size.values[0], 100))
    d.files[chain[-1]] = text_of([answer, d.spare[1]])
    solution = tuple(COMMANDS["hop"].format(f=name) for name in chain)
    problem = _simple(d, "hop", phrasing, answer, key=d.spare[0])
    return msgspec.structs.replace(problem, solution=solution)


def find(d: Draft, phrasing: str) -> Problem:
    """Which of the files holds a word; no other one does."""
    word = d.spare[0]
    owner = d.rng.choice(d.names)
    for name in d.names:
        kept = [line for line in d.files[name].split() if line != word] or [d.spare[1]]
        if name == owner:
            kept.insert(d.rng.randrange(len(kept) + 1), word)
        d.files[name] = text_of(kept)
    return Problem(family="find", prompt=phrasing.format(k=word), files=d.files, solution=(f"grep -l {word} *",), answer=owner, key=word)


def write(d: Draft, phrasing: str) -> Problem:
    """A count written into a new file; the resulting file is graded and the final answer is not."""
    f, g = d.names[0], f"{d.spare[0]}.txt"
    count = str(d.files[f].count("\n"))
    return Problem(
        family="write",
        prompt=phrasing.format(f=f, g=g),
        files=d.files,
        solution=(f"wc -l < {f} > {g}", f"cat {g}"),
        answer=None,
        subject=f,
        result_file=g,
        expected_result=count,
    )


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Something a small script does with the file it is given: in words, rightly and wrongly in bash, and in Python."""

    words: str
    right: str
    wrong: tuple[str, ...]
    expected: Callable[[str], str]


JOBS: tuple[Job, ...] = (
    Job(
        words="print the sum of column 2",
        right="awk '{s+=$2}END{print s}' \"$input\"",
        wrong=("awk '{s+=$1}END{print s}' \"$input\"", "awk '{s=$2}END{print s}' \"$input\""),
        expected=lambda text: str(sum(int(line.split()[1]) for line in text.splitlines())),
    ),
    Job(
        words="print the number of lines",
        right='wc -l < "$input"',
        wrong=('wc -w < "$input"', 'wc -c < "$input"'),
        expected=lambda text: str(text.count("\n")),
    ),
    Job(
        words="print column 1 of the last line",
        right="tail -n 1 \"$input\" | cut -d ' ' -f 1",
        wrong=("head -n 1 \"$input\" | cut -d ' ' -f 1", "tail -n 1 \"$input\" | cut -d ' ' -f 2"),
        expected=lambda text: text.splitlines()[-1].split()[0],
    ),
)
HIDDEN_RUNS = 3


def fix(d: Draft, phrasing: str) -> Problem:
    """A script with one mistake: mend it, run it, answer what it prints. Graded on the answer and on runs with hidden inputs."""
    f, script = d.names[0], f"{d.spare[0]}.sh"
    job = d.rng.choice(JOBS)
    wrong = d.rng.choice(job.wrong)
    d.files[f] = _table(d)
    d.files[script] = f"#!/bin/bash\n# use: bash {script} FILE\ninput=$1\n{wrong}\n"
    hidden = [_table(d) for _ in range(HIDDEN_RUNS)]
    mended = f"#!/bin/bash\ninput=$1\n{job.right}\n"
    return Problem(
        family="fix",
        prompt=phrasing.format(f=f, s=script, job=job.words),
        files=d.files,
        solution=(f"cat {script}", f"cat > {script} <<'END'\n{mended}END", f"bash {script} {f}"),
        answer=job.expected(d.files[f]),
        subject=f,
        key=job.words,
        result_file=script,
        hidden_runs=tuple(HiddenRun(input=text, expected=job.expected(text)) for text in hidden),
    )


def _table(d: Draft) -> str:
    rows = d.rng.randint(3, 6)
    return text_of([f"{word} {d.rng.randint(10, 19)}" for word in d.rng.sample(d.pool, rows)])


def _simple(d: Draft, family: str, phrasing: str, answer: str, key: str = "") -> Problem:
    f = d.names[0]
    k = key or d.spare[0]
    return Problem(
        family=family,
        prompt=phrasing.format(f=f, k=k),
        files=d.files,
        solution=(COMMANDS[family].format(f=f, k=k),),
        answer=answer,
        subject=f,
        key=k,
    )


GENERATORS: Mapping[str, Callable[[Draft, str], Problem]] = {
    "lines": lines,
    "files": files,
    "read": read,
    "sum": sum_,
    "last": last,
    "hop": hop,
    "find": find,
    "write": write,
    "fix": fix,
}
"""Family -> its generator."""
