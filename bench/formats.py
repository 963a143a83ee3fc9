"""Held-out gains on environments that others' formats describe: Harbor task folders and a dataset of reasoning-gym.

The tiny agent that reads characters is warm-started on confused demonstrations (one in ten is right), then learns by GRPO from the
formats' own graders: for Harbor a script in a fresh sandbox after the agent is dead, for reasoning-gym the dataset's scorer in a sandbox
of its own. Prints the held-out pass rate before and after, with 95 % intervals, and the seconds of a step.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from sandmill.environments.builtin.shell.words import WORDS

JOBS = {
    "folder": ("mkdir out", "test -d out && test ! -L out"),
    "file": ("touch out", "test -f out && test ! -s out"),
    "link": ("ln -s . out", "test -L out"),
    "hello": ("echo hi >out", 'test "$(cat out)" = hi'),
    "pipe": ("mkfifo out", "test -p out"),
}
TASK = '[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 30.0\n[agent]\ntimeout_sec = 60.0\n'
VERIFY = "#!/bin/bash\ncd /app\nif {check}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
console = Console(stderr=True)


def harbor_folders(folder: Path) -> dict[str, Any]:
    """160 task folders: an instruction of three words, of which one says what to make of `out`. Held out are other words around it."""
    pick = random.Random(0)
    for number in range(160):
        job = list(JOBS)[number % len(JOBS)]
        command, check = JOBS[job]
        before, after = pick.sample(WORDS, 2)
        task = folder / f"t{number:03d}"
        files = {
            "task.toml": TASK,
            "instruction.md": f"{before} {job} {after}\n",
            "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
            "solution/solve.sh": f"#!/bin/bash\n{command}\n",
            "tests/test.sh": VERIFY.format(check=check),
        }
        for name, text in files.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
    environment = {"name": f"harbor/{folder}", "trainTasks": 96, "heldOutTasks": 48, "options": {"base": "host"}}
    parameters = {"steps": 30, "batchSize": 8, "numGenerations": 8, "maxTurns": 2, "maxCompletionLength": 20, "learningRate": 3e-3}
    return {"environment": environment, "warmStart": {"steps": 400}, "parameters": parameters, "resources": {"contextLength": 96}}


def reasoning_gym(_: Path) -> dict[str, Any]:
    """Syllogisms, to be answered by Yes or No."""
    environment = {"name": "reasoning-gym/syllogism@0.1.25", "trainTasks": 512, "heldOutTasks": 192}
    parameters = {"steps": 50, "batchSize": 16, "numGenerations": 8, "maxTurns": 1, "maxCompletionLength": 8, "learningRate": 3e-3}
    return {"environment": environment, "warmStart": {"steps": 300}, "parameters": parameters, "resources": {"contextLength": 224}}


RUNS = {"harbor": harbor_folders, "reasoning-gym": reasoning_gym}


def trained(name: str, folder: Path) -> dict[str, Any]:
    """The summary of one training."""
    (folder / "tasks").mkdir()
    spec = {"model": {"uri": "sandmill/tiny-text"}, **RUNS[name](folder / "tasks")}
    spec["warmStart"] |= {"batchSize": 24, "learningRate": 2e-3}
    spec["parameters"] |= {"learningRateSchedule": "linear"}
    (folder / "run.yaml").write_text(yaml.safe_dump({"spec": spec}))
    run = ["--run", str(folder / "run")]
    subprocess.run([sys.executable, "-m", "sandmill.cli", "train", str(folder / "run.yaml"), *run], check=True, stdout=sys.stderr)
    told = subprocess.run([sys.executable, "-m", "sandmill.cli", "report", str(folder / "run"), "--json"], check=True, capture_output=True)
    return dict(json.loads(told.stdout))


def main(names: Annotated[list[str] | None, typer.Argument(help="Which of them; all by default.")] = None) -> None:
    """Trains and compares."""
    table = Table("format", "sampling", "before", "after", "change", "failures", "s a step", title="held-out pass rate, 95 % intervals")
    for name in names or list(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            summary = trained(name, Path(folder))
        for split in summary["splits"]:
            cells = [_rate(split[when], split[f"{when}_interval"]) for when in ("before", "after", "change")]
            way = "greedy" if split["greedy"] else "sampled"
            table.add_row(name, way, *cells, str(split["failures"]), f"{summary['seconds_per_step']:.2f}")
    console.print(table)


def _rate(value: float | None, interval: list[float] | None) -> str:
    return "-" if value is None or interval is None else f"{100 * value:.1f} % [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


if __name__ == "__main__":
    typer.run(main)
