"""The field cases and the tests that show them. In: this folder's tests, by their marks. Out: docs/field-cases.md.

python tests/field/field_cases.py    writes it
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent
DOCUMENT: Final = FOLDER.parents[1] / "docs" / "field-cases.md"
SYMPTOMS: Final = {
    1: "one odd byte in a command's output ends the rollout",
    2: "a child in the background keeps the pipe open and the call hangs",
    3: "an open stdin of the caller keeps a command from returning, and its timeout from firing",
    4: "deadlock where output is read after the exit",
    5: "a flood of output fills the host's memory",
    7: "one line longer than 64 KiB breaks the reader",
    10: "a hung heredoc poisons the next command",
    12: "a singleton beside equal rewards has an advantage of thousands",
    13: "a timeout kills the client and not the command",
    14: "the leader dies, its children live on and hold the port",
    15: "zombies pile up until fork fails",
    16: "the sandbox is gone and the model is asked on",
    17: "sandboxes that ended are left behind",
    18: "orphans fill the disk, and a full disk becomes a score",
    19: "a command runs twice because its answer was lost",
    20: "one lost answer makes several sandboxes",
    21: "servers that start together want the same port",
    22: "more creations than threads deadlock",
    23: "an id becomes a path",
    25: "what the kernel lacks is noticed late and taken for output",
    27: "a template that drops thinking rewrites the history",
    28: "tokens and their masks have different lengths",
    29: "log-probabilities belong to other tokens",
    30: "an end that was sampled is replaced by one of probability 1",
    31: "a good reply counts as cut off",
    32: "malformed arguments of a call end the rollout",
    33: "a call without arguments ends the trainer",
    35: "that a reply was cut is lost or taken for a format error",
    37: "parameters of one tool appear as null in another",
    39: "half an emoji stops an evaluation",
    40: "a grader that ran out of time is a zero; an agent that did is thrown away",
    41: "a grader's own timeout fails off the main thread, and every reward is zero",
    42: "one expression pins the graders for the whole run",
    43: "an agent's own score file is believed",
    44: "exit(0) passes all tests",
    47: "a patch loses a newline or its line ends and does not apply",
    48: "noise before a marker loses a submission",
    49: "the grader was never called and the score is zero",
    51: "a missing column fails far from its cause",
    52: "equal rewards are not seen as equal",
    53: "an ungradable member counts as zero, or its NaN spreads",
    55: "an empty answer has its reward on padding",
    56: "NaN times a mask of zero is NaN",
    57: "a rollout that failed is trained on",
    58: "one lost sandbox throws the group away, or a group of one trains",
    60: "slow tasks never reach the trainer",
    61: "the ratio uses log-probabilities of another policy",
    63: "a finished run never exits",
    64: "an environment's server dies and requests wait for ever",
    65: "an outage burns the budget on failing rollouts",
    67: "a resumed run repeats or skips prompts, or reads another data set",
    69: "an unknown price is zero",
    70: "attempts that failed cost nothing",
}
NOT_YET: Final = {
    60: "asynchronous training",
    63: "asynchronous training",
}
"""Cases of what does not exist yet, and what that is."""
PARTLY: Final = {
    27: "agents that rewrite their own history start no new training row yet",
    58: "members are dropped and counted, not drawn again",
    61: "in synchronous training",
}


class Test(NamedTuple):
    """One test of this folder."""

    file: str
    name: str
    cases: tuple[int, ...]
    pattern: int | None


def tests() -> Iterator[Test]:
    """Every test of this folder with what its marks say."""
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = dict(_marks(node))
                yield Test(path.name, node.name, marks.get("case", ()), next(iter(marks.get("pattern", ())), None))


def shown() -> dict[int, list[Test]]:
    """Case -> the tests that show it."""
    found: dict[int, list[Test]] = {}
    for test in tests():
        for number in test.cases:
            found.setdefault(number, []).append(test)
    return dict(sorted(found.items()))


def document() -> str:
    """docs/field-cases.md."""
    lines = [
        "# Field cases",
        "",
        "What went wrong for others who do this job, and the tests in `tests/field/` that show it does not happen here. Their names carry",
        "repository and number of the public report. Made by `python tests/field/field_cases.py`; a test compares the two.",
        "",
        "| case | what went wrong | shown by |",
        "|---|---|---|",
    ]
    found = shown()
    for number, symptom in sorted(SYMPTOMS.items()):
        names = sorted({f"`{test.file.removeprefix('test_').removesuffix('.py')}`: {_words(test.name)}" for test in found.get(number, ())})
        notes = [f"not yet: {NOT_YET[number]}"] if number in NOT_YET else [f"partly: {PARTLY[number]}"] if number in PARTLY else []
        lines.append(f"| {number} | {symptom} | {'; '.join([*names, *notes])} |")
    return "\n".join(lines) + "\n"


def _marks(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, tuple[int, ...]]]:
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in ("case", "pattern"):
            yield one.func.attr, tuple(ast.literal_eval(word) for word in one.args)


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


if __name__ == "__main__":
    DOCUMENT.write_text(document())
