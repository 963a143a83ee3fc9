"""A small package that talks back, as an adapter without anything installed: count down to zero, by a tool or by saying numbers."""

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import foreign
from sandmill.environments.access.access import NOTHING
from sandmill.environments.formats.plan import CommonOptions, Plan
from sandmill.environments.packages.package import Package
from sandmill.sandboxes.dual import block_on

ADAPTER = """
import asyncio, json, os, random, sys, threading, time

TOOL = {"type": "function", "function": {"name": "guess", "description": "Take away.", "parameters":
    {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}}}

class Adapter:
    def describe(self):
        return {"name": "countdown", "version": "1", "splits": {"train": 4, "heldout": 2}, "multi_turn": True,
                "tools": [json.dumps(TOOL)], "sessions": 2}

    def tasks(self, split, start, stop):
        return [{"prompt": f"{split} {n}", "row": {"start": 40 + n}} for n in range(start, stop)]

    async def open(self, row):
        self.left, self.moves, self.lock = row["start"], [], asyncio.Lock()
        self.drawn = random.random()
        return OPENED

    def call(self, tool, arguments):
        return self.take(arguments["number"])

    async def reply(self, text):
        async with self.lock:
            return self.take(text)

    def take(self, text):
        print("noise", flush=True)
        if text == "hang":
            time.sleep(60)
        if text == "raise":
            raise RuntimeError("the game broke")
        if text == "5":
            os._exit(7)
        if text == "lower":
            return {"observation": ["no", "text"]}
        if text == "sleep":
            time.sleep(1.5)
        if text == "stop":
            return {"observation": "", "done": True}
        if not text.isdigit():
            return {"observation": "a number, please", "ok": False}
        self.left -= int(text)
        self.moves.append(int(text))
        return {"observation": f"left {self.left}", "done": self.left <= 0}

    def finish(self, answer, limit, messages):
        if answer == "stop" and not self.moves:
            return {"reward": "nothing"}
        return {"reward": float(self.left == 0), "parts": {"moves": len(self.moves), "messages": len(messages), "drawn": self.drawn},
                "answered": bool(self.moves)}

def load(options):
    return Adapter()
"""


def countdown(opened='{"prompt": f"count {self.left} down"}', source=ADAPTER, access=NOTHING):
    """The loaded environment; `opened` is what its `open` returns, `access` what its grader may use."""
    plan = Plan(
        reference="test/countdown@1",
        name="test/countdown",
        version="1",
        package=Package(),
        adapter=source.replace("OPENED", opened),
        load={},
        common=CommonOptions(),
        source="countdown",
    )
    section = EnvironmentSection(name="countdown", train_tasks=3, held_out_tasks=1)
    return block_on(foreign._load(plan, section, lambda line: None, False, access))
