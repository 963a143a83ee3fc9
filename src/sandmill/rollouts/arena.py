"""Everything an episode needs that is not the episode: model, dialogue, environment, limits and where sandboxes come from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandmill.environments.environment import Environment
from sandmill.environments.grading import GraderHealth
from sandmill.errors import EnvironmentFailed
from sandmill.models.chat import Dialogue
from sandmill.models.model import Model
from sandmill.sandboxes import Pool, Sandbox, SandboxSpec


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The agent's limits (they lead to AgentLimited) and ours (they lead to InfrastructureFailure)."""

    max_turns: int
    """Replies of the model per episode."""
    max_completion_length: int
    """Tokens per reply."""
    command_timeout_s: float
    max_observation: int
    """Characters of one command's output shown to the model."""
    episode_timeout_s: float = 3600.0
    environment_timeout_s: float = 60.0
    """For each answer of an environment that takes part in the dialogue."""
    grading_timeout_s: float = 30.0
    retries: int = 1
    """Further attempts after a retryable InfrastructureFailure."""


class SandboxSource:
    """Hands out fresh sandboxes, at most `capacity` alive at once, and tears them down in the background.

    Ready-made sandboxes come from a pool that refills when none is in use: then the trainer computes, on fewer processors than
    episodes keep busy. `close()` returns when every sandbox is gone.
    """

    def __init__(self, spec: SandboxSpec, *, capacity: int, ready: int) -> None:
        self._pool = Pool(spec, size=min(ready, capacity), eager=False)
        self._in_use = 0
        self._slots = asyncio.Semaphore(capacity)
        self._endings: set[asyncio.Task[None]] = set()

    async def take(self, files: Mapping[str, bytes], spec: SandboxSpec | None = None) -> Sandbox:
        """A sandbox with `files` in its workdir, of limits `spec` (None: the pool's), which is on this machine, as its image is.

        Waits for a slot; raises SandboxError when creation fails.
        """
        await self._slots.acquire()
        self._in_use += 1
        try:
            if spec is not None and spec != self._pool.spec:
                return await Sandbox.from_spec.aio(spec, files=files, server="")
            return await self._pool.take.aio(files)
        except BaseException:
            self._free_slot()
            raise

    def give_back(self, sandbox: Sandbox) -> None:
        """Starts the sandbox's termination and returns at once; the slot is free again when it is gone."""
        ending = asyncio.ensure_future(self._end(sandbox))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.terminate.aio()
        finally:
            self._free_slot()
            if not self._in_use:
                await self._pool.fill.aio()

    def _free_slot(self) -> None:
        self._in_use -= 1
        self._slots.release()

    async def close(self) -> None:
        """Ends the pool and waits for every termination under way. Idempotent."""
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._pool.close.aio()


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The place where episodes run. Lives on the sandbox event loop."""

    environment: Environment
    model: Model
    dialogue: Dialogue
    sandboxes: SandboxSource
    limits: Limits
    max_in_flight: int
    seed: int
    health: GraderHealth
    origin: float = field(default_factory=time.perf_counter)

    def check_grader(self) -> None:
        """Raises EnvironmentFailed when the grader is broken: the rest of a step would only be thrown away."""
        if broken := self.health.broken():
            raise EnvironmentFailed(f"{broken}; mend it and go on with --resume")
