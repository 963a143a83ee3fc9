"""A manifest in; the parts of a run out: environment, model, policy, engine and the arena where episodes run.

Everything a person can get wrong is found here, before a single token is sampled.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sandmill.config.manifest import Manifest, Spec
from sandmill.config.quantities import parse_bytes, parse_duration
from sandmill.environments import registry
from sandmill.environments.access.access import access_of
from sandmill.environments.check import refuse_failing
from sandmill.environments.environment import Environment
from sandmill.environments.grading import GraderHealth
from sandmill.environments.handover import ChoosesSandboxes
from sandmill.environments.interaction import offer_of
from sandmill.environments.mcp.equipped import equipped
from sandmill.environments.packages.install import Report
from sandmill.errors import ConfigError
from sandmill.models.chat import Dialogue, dialogue_for
from sandmill.models.engines.torch import TorchEngine
from sandmill.models.judging import EmbeddedJudge
from sandmill.models.loading import LoadedModel
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.model import Sampling
from sandmill.rollouts.arena import Arena, Limits, SandboxSource
from sandmill.sandboxes import Egress, loop

R = TypeVar("R")
SMALL_MODEL_PARAMETERS = 10_000_000
"""Below this a second torch thread costs more than it brings, and the other core is better spent on sandboxes."""


def on_loop(work: Coroutine[Any, Any, R]) -> R:
    """Runs `work` on the sandbox event loop and waits for it; a KeyboardInterrupt cancels it and waits for its clean-up."""
    future = asyncio.run_coroutine_threadsafe(work, loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        deadline = time.monotonic() + 10.0
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.02)
        raise
    except CancelledError as error:
        raise RuntimeError("the episode loop was cancelled from outside") from error


def resolve_environment(spec: Spec, report: Report = lambda line: None) -> Environment:
    """The environment, with the splits that the manifest names; `report` is told what is installed.

    Raises ConfigError, UnknownEnvironment, EnvironmentFailed.
    """
    access = access_of(spec.grading, spec.tools, EmbeddedJudge.of)
    environment = registry.get(spec.environment.name, spec.environment, report, access)
    for split in ("train", *spec.evaluation.splits):
        if split not in environment.splits:
            known = ", ".join(environment.splits)
            raise ConfigError(f"{spec.environment.name} has no split {split!r}; it has {known}", field="spec.evaluation.splits")
    refuse_failing(environment, allow=spec.environment.allow_failing)
    return on_loop(equipped(environment, spec.tools.mcp))


def torch_threads(spec: Spec, loaded: LoadedModel) -> int:
    """Threads for training and sampling: as the manifest says, else one for small models and one per core for others.

    Two threads on two busy cores wait for each other: a warm-start step of the tiny model then takes four times as long.
    """
    if spec.resources.threads is not None:
        return spec.resources.threads
    return 1 if loaded.parameter_count < SMALL_MODEL_PARAMETERS else len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of. `close()` ends engine and sandboxes; idempotent."""

    spec: Spec
    environment: Environment
    loaded: LoadedModel
    dialogue: Dialogue
    policy: LoraPolicy
    engine: TorchEngine
    arena: Arena

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """How replies are sampled: as in training, or greedily."""
        parameters = self.spec.parameters
        return Sampling(
            max_new_tokens=parameters.max_completion_length,
            stop_ids=self.dialogue.stop_ids,
            temperature=0.0 if greedy else parameters.sampling.temperature,
            top_p=parameters.sampling.top_p,
        )

    def close(self) -> None:
        on_loop(self._close())

    async def _close(self) -> None:
        await self.engine.close()
        await self.arena.sandboxes.close()
        if hasattr(self.environment, "close"):
            await self.environment.close()


def assemble(manifest: Manifest, environment: Environment, loaded: LoadedModel, policy: LoraPolicy) -> Parts:
    """Starts the engine and the sandbox pool around the given model. The caller closes the parts."""
    spec = manifest.spec
    threads = torch_threads(spec, loaded)
    rows = min(spec.resources.max_in_flight, 4096)
    engine = TorchEngine(loaded, rows=rows, context_length=spec.resources.context_length, threads=threads, hidden=policy.hidden_states)
    try:
        dialogue = dialogue_for(loaded, spec.model.dialogue, offer_of(environment))
        arena = on_loop(_arena(spec, environment, engine, dialogue))
    except BaseException:
        on_loop(engine.close())
        raise
    return Parts(spec=spec, environment=environment, loaded=loaded, dialogue=dialogue, policy=policy, engine=engine, arena=arena)


async def _arena(spec: Spec, environment: Environment, engine: TorchEngine, dialogue: Dialogue) -> Arena:
    """On the sandbox loop, where its semaphores belong."""
    sandbox = msgspec.structs.replace(
        environment.sandbox,
        cpu=spec.sandbox.cpu,
        memory_bytes=parse_bytes(spec.sandbox.memory, field="spec.sandbox.memory"),
        disk_bytes=parse_bytes(spec.sandbox.disk, field="spec.sandbox.disk"),
        backend=spec.sandbox.backend or environment.sandbox.backend,
        network=environment.sandbox.network if spec.sandbox.network is None else Egress.of(spec.sandbox.network.egress),
    )
    limits = Limits(
        max_turns=spec.parameters.max_turns,
        max_completion_length=spec.parameters.max_completion_length,
        command_timeout_s=parse_duration(spec.sandbox.command_timeout, field="spec.sandbox.commandTimeout"),
        max_observation=spec.sandbox.max_observation,
        grading_timeout_s=parse_duration(spec.grading.timeout, field="spec.grading.timeout"),
        retries=spec.grading.retries,
    )
    capacity = spec.resources.max_sandboxes
    ready = 0 if isinstance(environment, ChoosesSandboxes) else capacity
    return Arena(
        environment=environment,
        model=engine,
        dialogue=dialogue,
        sandboxes=SandboxSource(sandbox, capacity=capacity, ready=ready),
        limits=limits,
        max_in_flight=spec.resources.max_in_flight,
        seed=spec.parameters.seed,
        health=GraderHealth(spec.grading.max_consecutive_failures),
    )
