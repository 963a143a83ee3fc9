"""Steps per minute and sampled tokens per second of Sandmill beside TRL's GRPOTrainer: same model folder, tasks, group shape and LoRA.

Each side runs in a process of its own, one after the other, TRL in a virtual environment of its own that is made on the first use.
With `--reward spread` (the default) every sampled token has a gradient on both sides; with `task` the task's own reward decides, and
Sandmill skips the groups that have none. Step times are end to end, from the end of one step to the end of the next.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from training_workload import SPREAD, TASK, Measured, Workload

from sandmill.config.manifest import EnvironmentSection, LoraSection
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.models.bundled import cache_folder
from sandmill.models.loading import SMOLLM2, TINY_SHELL, load, save_folder
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.warmstart import warm_start

HERE = Path(__file__).parent
PEER = ("torch==2.13.0", "transformers==5.24.0", "peft==0.21.0", "trl==1.16.0", "msgspec", "pyyaml", "renderers==0.1.12", "httpx")
WARM_STEPS = {"tiny": 400, "smollm2": 60}
SMOLLM2_TOP_LAYERS = 10
console = Console(stderr=True)


def warmed_folder(model: str) -> Path:
    """The model after a short warm start (all weights of the tiny one, an adapter merged into SmolLM2), kept in the cache."""
    environment = ShellEnvironment(EnvironmentSection(name=TASK))
    folder = cache_folder() / f"bench-{model}-{environment.digest[:12]}-{WARM_STEPS[model]}"
    if folder.is_dir():
        return folder
    console.print(f"warm-starting {model} ({WARM_STEPS[model]} steps, once)")
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    if model == "tiny":
        torch.set_num_threads(1)
        loaded = load(TINY_SHELL, seed=0)
        warm_start(loaded, environment.demonstrations(0), steps=WARM_STEPS[model], batch_size=64, learning_rate=2e-3, seed=0)
        save_folder(loaded, work)
    else:
        loaded = load(SMOLLM2)
        policy = LoraPolicy(loaded, LoraSection(top_layers=SMOLLM2_TOP_LAYERS), seed=0)
        demonstrations = environment.demonstrations(0)
        warm_start(loaded, demonstrations, steps=WARM_STEPS[model], batch_size=16, learning_rate=1e-3, seed=0, policy=policy)
        policy.save_adapter(work / "adapter")
        merged = PeftModel.from_pretrained(load(SMOLLM2).model, work / "adapter").merge_and_unload()
        shutil.rmtree(work / "adapter")
        merged.save_pretrained(work)
        loaded.tokenizer.save_pretrained(work)
    work.rename(folder)
    return folder


def workload(model: str, reward: str, steps: int, warm_up: int, top_layers: int | None) -> Workload:
    """The tiny model as in examples/shell-tiny.yaml, SmolLM2 as in examples/shell-smollm2.yaml."""
    common: dict[str, Any] = {
        "folder": str(warmed_folder(model)),
        "reward": SPREAD if reward == "spread" else TASK,
        "warm_up": warm_up,
        "measured": steps,
        "max_turns": 3,
        "train_tasks": 1200,
        "top_layers": top_layers,
    }
    if model == "tiny":
        return Workload(
            batch_size=24,
            num_generations=16,
            max_completion_length=10,
            micro_batch_size=64,
            peer_micro_batch_size=384,
            learning_rate=2e-3,
            **common,
        )
    return Workload(
        batch_size=6,
        num_generations=12,
        max_completion_length=24,
        micro_batch_size=12,
        peer_micro_batch_size=2,
        learning_rate=1e-3,
        context_length=192,
        max_observation=60,
        **common,
    )


def peer_python() -> Path:
    """The interpreter of TRL's own virtual environment."""
    folder = cache_folder() / "bench-trl"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(PEER):
        console.print(f"installing TRL and its packages into {folder} (once, some minutes)")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PEER], check=True)
        stamp.write_text("\n".join(PEER))
    return python


def run_side(python: Path, script: str, orders: Workload) -> Measured:
    """One side in a fresh process. Its own chatter goes to a file that is shown when it fails."""
    console.print(f"{script}: {orders.steps} steps, {orders.threads or 'default'} threads")
    with tempfile.TemporaryDirectory(prefix="bench-training-") as folder:
        orders_file, figures, log = Path(folder) / "orders.json", Path(folder) / "figures.json", Path(folder) / "log"
        orders_file.write_bytes(msgspec.json.encode(orders))
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        with open(log, "wb") as output:
            done = subprocess.run([python, HERE / script, orders_file, figures], env=environment, stdout=output, stderr=output, check=False)
        if done.returncode != 0:
            console.print(log.read_text(errors="replace")[-4000:], markup=False)
            raise SystemExit(f"{script} ended with exit code {done.returncode}; its last lines are above")
        return msgspec.json.decode(figures.read_bytes(), type=Measured)


def figures(measured: Measured) -> dict[str, Any]:
    """Medians over the measured steps."""
    rates = [tokens / seconds for tokens, seconds in zip(measured.sampled_tokens, measured.seconds, strict=True)]
    return {
        "seconds_per_step": statistics.median(measured.seconds),
        "seconds_per_step_best": min(measured.seconds),
        "steps_per_minute": 60 / statistics.median(measured.seconds),
        "sampled_tokens_per_second": statistics.median(rates),
        "sampled_tokens_per_step": statistics.median(measured.sampled_tokens),
        "trained_share": statistics.median(measured.trained_share),
        "turns_per_step": statistics.median(measured.turns),
        "commands_per_step": statistics.median(measured.commands),
        "peak_rss_mb": measured.peak_rss_bytes / 1e6,
        "parts_s": measured.parts,
        "steps": len(measured.seconds),
    }


def shown(model: str, reward: str, sides: dict[str, dict[str, Any]], ratio: dict[str, float]) -> Table:
    table = Table(
        "",
        "Sandmill",
        "TRL",
        "ratio",
        title=f"GRPO on {model}, reward {reward}: medians of {sides['sandmill']['steps']} and {sides['trl']['steps']} steps",
    )
    for key, digits in (
        ("steps_per_minute", 2),
        ("sampled_tokens_per_second", 1),
        ("seconds_per_step", 2),
        ("seconds_per_step_best", 2),
        ("sampled_tokens_per_step", 0),
        ("trained_share", 2),
        ("turns_per_step", 0),
        ("commands_per_step", 0),
        ("peak_rss_mb", 0),
    ):
        own, peer = sides["sandmill"][key], sides["trl"][key]
        table.add_row(key.replace("_", " "), f"{own:.{digits}f}", f"{peer:.{digits}f}", f"{ratio[key]:.2f}" if key in ratio else "")
    for part, seconds in sides["sandmill"]["parts_s"].items():
        table.add_row(f"  of which {part}, s", f"{seconds:.2f}", "", "")
    return table


def joined(rounds: list[Measured]) -> Measured:
    """The measured steps of several processes of one side."""
    return Measured(
        side=rounds[0].side,
        seconds=tuple(value for part in rounds for value in part.seconds),
        sampled_tokens=tuple(value for part in rounds for value in part.sampled_tokens),
        trained_share=tuple(value for part in rounds for value in part.trained_share),
        turns=tuple(value for part in rounds for value in part.turns),
        commands=tuple(value for part in rounds for value in part.commands),
        peak_rss_bytes=max(part.peak_rss_bytes for part in rounds),
        parts={key: statistics.median(part.parts[key] for part in rounds) for key in rounds[0].parts},
    )


def main(
    model: Annotated[str, typer.Option(help="tiny or smollm2.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Measured steps of each side and round.")] = 6,
    rounds: Annotated[int, typer.Option(help="How often the sides take turns, so that a busy spell of the machine hits both.")] = 2,
    warm_up: Annotated[int, typer.Option(help="Steps before the first measured one of a round (at least 1).", min=1)] = 1,
    reward: Annotated[str, typer.Option(help="spread or task; see the file's head.")] = "spread",
    top_layers: Annotated[
        int | None, typer.Option(help="Adapter on this many top layers, on both sides. Default: all, 10 for smollm2.")
    ] = None,
    all_layers: Annotated[bool, typer.Option(help="Adapter on every layer of smollm2 too.")] = False,
    threads: Annotated[
        int | None, typer.Option(help="Torch threads on both sides. Default: 1 for tiny (fastest for both), all cores else.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Runs both sides and prints medians and their ratio."""
    if model not in ("tiny", "smollm2") or reward not in ("spread", "task"):
        raise SystemExit("--model is tiny or smollm2, --reward is spread or task")
    top = top_layers if top_layers is not None or model == "tiny" or all_layers else SMOLLM2_TOP_LAYERS
    threads = threads or (1 if model == "tiny" else os.cpu_count())
    orders = msgspec.structs.replace(workload(model, reward, steps, warm_up, top), threads=threads)
    peer = peer_python()
    own: list[Measured] = []
    theirs: list[Measured] = []
    for _ in range(rounds):
        own.append(run_side(Path(sys.executable), "training_sandmill.py", orders))
        theirs.append(run_side(peer, "training_trl.py", orders))
    sides = {result.side: figures(result) for result in (joined(own), joined(theirs))}
    ratio = {key: sides["sandmill"][key] / sides["trl"][key] for key in ("steps_per_minute", "sampled_tokens_per_second")}
    if as_json:
        print(
            json.dumps(
                {"model": model, "reward": reward, "workload": msgspec.to_builtins(orders), "sides": sides, "ratio": ratio}, indent=2
            )
        )
    else:
        Console().print(shown(model, reward, sides, ratio))


if __name__ == "__main__":
    typer.run(main)
