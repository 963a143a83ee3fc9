"""Held-out gains on environments that others' formats describe: Harbor task folders and a dataset of reasoning-gym.

The tiny agent that reads characters is warm-started on demonstrations, for Harbor on confused ones (one in ten is right), for
reasoning-gym on few, then learns by GRPO from the formats' own graders: for Harbor a script in a fresh sandbox after the agent is dead,
for reasoning-gym the dataset's scorer in a sandbox of its own. Prints the held-out pass rate before and after, with 95 % intervals, what
the best answer that is always the same would have got, and the seconds of a step. `--reward random` is the control.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from sandmill.config.load import load_manifest
from sandmill.config.manifest import RewardControl
from sandmill.environments import registry
from sandmill.environments.builtin.shell.words import WORDS
from sandmill.environments.foreign import ForeignEnvironment
from sandmill.sandboxes.dual import block_on

JOBS = {
    "folder": ("mkdir out", "test -d out && test ! -L out"),
    "file": ("touch out", "test -f out && test ! -s out"),
    "link": ("ln -s . out", "test -L out"),
    "hello": ("echo hi >out", 'test "$(cat out)" = hi'),
    "pipe": ("mkfifo out", "test -p out"),
}
TASK = '[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 30.0\n[agent]\ntimeout_sec = 60.0\n'
VERIFY = "#!/bin/bash\ncd /app\nif {check}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
EXAMPLE = Path(__file__).parent.parent / "examples" / "reasoning-gym-tiny.yaml"
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
    """How many sisters a brother has: one of eight answers, to be found by what the number stands beside."""
    return dict(yaml.safe_load(EXAMPLE.read_text())["spec"])


RUNS = {"harbor": harbor_folders, "reasoning-gym": reasoning_gym}


def specification(name: str, folder: Path, seed: int, reward: RewardControl) -> dict[str, Any]:
    """What is trained, with this seed and these rewards."""
    spec = {"model": {"uri": "sandmill/tiny-text"}, **RUNS[name](folder)}
    spec["warmStart"] = {"batchSize": 24, "learningRate": 2e-3, **spec["warmStart"], "seed": seed}
    spec["parameters"] |= {"learningRateSchedule": "linear", "seed": seed, "reward": reward.value}
    return spec


def trained(manifest: Path) -> dict[str, Any]:
    """The summary of one training."""
    run = ["--run", str(manifest.with_name("run"))]
    subprocess.run([sys.executable, "-m", "sandmill.cli", "train", str(manifest), *run], check=True, stdout=sys.stderr)
    told = subprocess.run([sys.executable, "-m", "sandmill.cli", "report", run[1], "--json"], check=True, capture_output=True)
    return dict(json.loads(told.stdout))


def best_constant(manifest: Path) -> str:
    """How many of the held-out tasks the best answer that is always the same solves, where the environment knows the answers."""
    section = load_manifest(manifest).spec.environment
    environment = registry.get(section.name, section)
    if not isinstance(environment, ForeignEnvironment):
        return "-"
    held_out = environment.splits["heldout"]
    ((_, count),) = Counter(environment.expected_answer(task) for task in held_out).most_common(1)
    block_on(environment.close())
    return f"{100 * count / len(held_out):.1f} %"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which of them; all by default.")] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each, one seed each.")] = 1,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    reward: Annotated[RewardControl, typer.Option(help="`random` deals the rewards out anew: the control.")] = RewardControl.TASK,
) -> None:
    """Trains and compares."""
    head = ("format", "seed", "rewards", "sampling", "before", "after", "change", "best constant", "failures", "s a step")
    table = Table(*head, title="held-out pass rate, 95 % intervals")
    for name in names or list(RUNS):
        for seed in range(first, first + seeds):
            with tempfile.TemporaryDirectory() as folder:
                manifest = Path(folder, "run.yaml")
                manifest.write_text(yaml.safe_dump({"spec": specification(name, Path(folder, "tasks"), seed, reward)}))
                summary, constant = trained(manifest), best_constant(manifest)
            for split in summary["splits"]:
                cells = [_rate(split[when], split[f"{when}_interval"]) for when in ("before", "after", "change")]
                way = "greedy" if split["greedy"] else "sampled"
                more = (constant, str(split["failures"]), f"{summary['seconds_per_step']:.2f}")
                table.add_row(name, str(seed), reward.value, way, *cells, *more)
    console.print(table)


def _rate(value: float | None, interval: list[float] | None) -> str:
    return "-" if value is None or interval is None else f"{100 * value:.1f} % [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


if __name__ == "__main__":
    typer.run(main)
