"""TRL's side of the training benchmark: GRPOTrainer with its own sampler, multi-turn through `rollout_func`. In: a workload; out: figures.

The rounds follow TRL's own tool loop (every round generates from the whole conversation so far, for the episodes still going on). The
dialogue's tokens, the tasks and the grader are Sandmill's. Commands are bare subprocesses in a plain folder: no isolation, and no time
spent on it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from peft import LoraConfig
from training_workload import Measured, Workload, read, register
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sandmill.environments import registry
from sandmill.environments.task import Command, Limit, Submission, Task, reward_of
from sandmill.models.chat import Answer, Call, Observation, dialogue_for
from sandmill.models.loading import load
from sandmill.models.model import StopReason

COMMAND_TIMEOUT_S = 10.0


@dataclass
class Conversation:
    """One episode on its way."""

    task: Task
    folder: Path
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    answer: str | None = None
    limit: Limit | None = None
    over: bool = False
    turns: int = 0


class Rollouts:
    """TRL's `rollout_func`."""

    def __init__(self, workload: Workload, loaded: Any) -> None:
        self.workload = workload
        self.environment = registry.get(workload.reward, workload.section)
        self.tasks = {task.id: task for task in self.environment.splits["train"]}
        self.dialogue = dialogue_for(loaded, workload.dialogue)
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.tokens: list[int] = []
        self.turns: list[int] = []
        self.commands: list[int] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="bench-trl-") as root:
            conversations = [self._open(prompt, Path(root) / str(index)) for index, prompt in enumerate(prompts)]
            for turn in range(self.workload.max_turns):
                alive = [conversation for conversation in conversations if not conversation.over]
                if not alive:
                    break
                replies, _ = trainer._generate_single_turn([c.prompt_ids + c.ids for c in alive], None, {}, num_generations=1)
                last = turn + 1 == self.workload.max_turns
                list(self.pool.map(lambda pair, last=last: self._take(*pair, last), zip(alive, replies, strict=True)))
            rewards = asyncio.run(self._grade(conversations))
        self.tokens.append(sum(sum(c.mask) for c in conversations))
        self.turns.append(sum(c.turns for c in conversations))
        self.commands.append(sum(len(c.commands) for c in conversations))
        return {
            "prompt_ids": [c.prompt_ids for c in conversations],
            "completion_ids": [c.ids for c in conversations],
            "logprobs": None,
            "env_mask": [c.mask for c in conversations],
            "outcome": rewards,
        }

    def _open(self, task_id: str, folder: Path) -> Conversation:
        task = self.tasks[task_id]
        for name, content in self.environment.files(task).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return Conversation(task, folder, list(self.dialogue.open(task.opening)))

    def _take(self, conversation: Conversation, reply: list[int], last: bool) -> None:
        """One reply: run its commands and append the observation, or end the episode."""
        conversation.ids += reply
        conversation.mask += [1] * len(reply)
        conversation.turns += 1
        if reply[-1] not in self.dialogue.stop_ids:
            conversation.over, conversation.limit = True, Limit.TOKENS
            return
        observations = []
        for action in self.dialogue.parse(reply, StopReason.STOP):
            if isinstance(action, Answer):
                conversation.over, conversation.answer = True, action.text
                return
            observations.append(self._run(conversation, action) if isinstance(action, Call) else Observation(text=action.reason, ok=False))
        if last:
            conversation.over, conversation.limit = True, Limit.TURNS
            return
        given = self.dialogue.observe(observations, StopReason.STOP)
        conversation.ids += given
        conversation.mask += [0] * len(given)

    def _run(self, conversation: Conversation, call: Call) -> Observation:
        script = call.arguments.get("command")
        if call.tool != "bash" or script is None or "\0" in script:
            return Observation(text="there is no such tool", ok=False)
        command = ["bash", "-c", script]
        kept = {"cwd": conversation.folder, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run(command, timeout=COMMAND_TIMEOUT_S, check=False, **kept)
        except subprocess.TimeoutExpired:
            conversation.commands.append(Command(script=script, exit_code=None, output=""))
            return Observation(text="", ok=False)
        output = done.stdout.decode("utf-8", "replace")[: self.workload.max_observation]
        conversation.commands.append(Command(script=script, exit_code=done.returncode, output=output))
        return Observation(text=output, ok=done.returncode == 0)

    async def _grade(self, conversations: list[Conversation]) -> list[float]:
        rewards = []
        for c in conversations:
            left = {str(path.relative_to(c.folder)): path.read_bytes() for path in c.folder.rglob("*") if path.is_file()}
            submission = Submission(answer=c.answer, commands=tuple(c.commands), limit=c.limit)
            rewards.append(float(reward_of(await self.environment.grade(c.task, submission, left)) or 0.0))
        return rewards


class Clock(TrainerCallback):
    """The wall clock at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.monotonic())


def outcome(prompts: list[str], completions: list[str], outcome: list[float], **_: Any) -> list[float]:
    """TRL's reward function: what the grader said."""
    return outcome


def config(workload: Workload, folder: str) -> GRPOConfig:
    """Sandmill's conventions in TRL's words; gradient checkpointing off, because it only costs time here."""
    rows = workload.batch_size * workload.num_generations
    micro = min(workload.peer_micro_batch_size, rows)
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=workload.num_generations,
        max_completion_length=workload.max_completion_length,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        max_steps=workload.steps,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=workload.seed,
    )


def measure(workload: Workload) -> Measured:
    torch.set_num_threads(workload.threads or os.cpu_count() or 1)
    loaded = load(workload.folder)
    rollouts = Rollouts(workload, loaded)
    tokenizer = loaded.tokenizer
    tokenizer.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    loaded.model.generation_config.eos_token_id = sorted(rollouts.dialogue.stop_ids)
    layers = loaded.model.config.num_hidden_layers
    top = None if workload.top_layers is None else list(range(layers - workload.top_layers, layers))
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        trainer = GRPOTrainer(
            model=loaded.model,
            reward_funcs=outcome,
            args=config(workload, folder),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in workload.tasks(rollouts.environment)]),
            processing_class=tokenizer,
            rollout_func=rollouts,
            callbacks=[clock],
            peft_config=LoraConfig(
                r=workload.lora_r,
                lora_alpha=workload.lora_alpha,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                layers_to_transform=top,
                task_type="CAUSAL_LM",
            ),
        )
        trainer.train()
    count = workload.measured
    return Measured(
        side="trl",
        seconds=tuple(later - earlier for earlier, later in zip(clock.ends[:-1], clock.ends[1:], strict=True))[-count:],
        sampled_tokens=tuple(rollouts.tokens[-count:]),
        trained_share=(1.0,) * count,
        turns=tuple(rollouts.turns[-count:]),
        commands=tuple(rollouts.commands[-count:]),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


if __name__ == "__main__":
    register()
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(measure(read(sys.argv[1]))))
