"""A small package whose rewards are over whole groups, as an adapter without anything installed: who says the most gets the most."""

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import foreign
from sandmill.environments.formats.plan import CommonOptions, Plan
from sandmill.environments.packages.package import Package
from sandmill.sandboxes.dual import block_on

ADAPTER = """
import json, os

class Adapter:
    def __init__(self, options):
        self.options = options

    def describe(self):
        return {"name": "contest", "version": "1", "splits": {"train": 4, "heldout": 2}, "grouped": True, "sessions": 2,
                "multi_turn": self.options["turns"]}

    def tasks(self, split, start, stop):
        return [{"prompt": f"{split} {n}", "row": {"n": n}} for n in range(start, stop)]

    def open(self, row):
        self.said = []
        return {"prompt": "say numbers"}

    def reply(self, text):
        if text == "raise":
            raise RuntimeError("the contest broke")
        if text == "exit":
            os._exit(7)
        self.said.append(text)
        return {"observation": "more", "done": text == "stop"}

    def hand_over(self, answer, limit, messages):
        return {"state": json.dumps(self.said)}

    def grade(self, row, answer, context):
        raise RuntimeError("replies are not graded one by one")

    def grade_group(self, row, members):
        said = [json.loads(one["state"]) if "state" in one else [one["answer"] or ""] for one in members]
        return [self.score(one, said) for one in said] + self.options["more"]

    def score(self, one, said):
        if "error" in one:
            raise RuntimeError("the grader broke")
        if "fail" in one:
            return {"failed": "a reward function raised"}
        if "nan" in one:
            return float("nan")
        mine = [sum(map(int, filter(str.isdigit, texts))) for texts in said]
        below = sum(other < mine[said.index(one)] for other in mine)
        return {"reward": float(below), "parts": {"members": len(said)}}

def load(options):
    return Adapter(options)
"""


def contest(*, turns, more=()):
    """The loaded environment; `more` is what the grader adds to its list of scores."""
    plan = Plan(
        reference="test/contest@1",
        name="test/contest",
        version="1",
        package=Package(),
        adapter=ADAPTER,
        load={"turns": turns, "more": list(more)},
        common=CommonOptions(),
        source="contest",
    )
    return block_on(foreign._load(plan, EnvironmentSection(name="contest", train_tasks=2, held_out_tasks=1), lambda line: None, False))
