"""The policy before reinforcement learning: load the manifest's model, warm-start it where asked, put a fresh adapter on it.

A small model is warm-started in all its parameters and kept in the run folder (`base/`), which the adapter then belongs to; a large
one is warm-started through the adapter itself, which the first checkpoint keeps. A kill during either repeats it: the same bits.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from sandmill.config.manifest import Manifest
from sandmill.environments.demonstration import Demonstration
from sandmill.environments.environment import Environment
from sandmill.errors import ConfigError
from sandmill.models.loading import LoadedModel, load
from sandmill.models.lora_policy import LoraPolicy, check_adapter
from sandmill.models.warmstart import FULL_PARAMETERS_LIMIT, WarmStartProgress, warm_start
from sandmill.rollouts.events import Listener, RunStage, StageAdvanced, StageChanged
from sandmill.store import RunFolder, disk_full_named


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can show how its dialogues look. With a parameter `right` it lets the share of those that are right be chosen."""

    def demonstrations(self, seed: int) -> Iterator[Demonstration]: ...


def load_base(manifest: Manifest, environment: Environment, path: Path) -> LoadedModel:
    """The model of the run at `path`: its own warm-started one where it kept one, else the manifest's.

    Raises ModelNotFound, and ConfigError for a warm start that cannot be made. Writes nothing.
    """
    spec = manifest.spec
    if spec.warm_start.steps:
        _check_demonstrates(environment, manifest)
    base = path / "base"
    loaded = load(str(base)) if base.is_dir() else load(spec.model.uri, seed=spec.parameters.seed)
    check_adapter(loaded.model, spec.parameters.lora)
    return loaded


def _check_demonstrates(environment: Environment, manifest: Manifest) -> None:
    name, settings = manifest.spec.environment.name, manifest.spec.warm_start
    if not isinstance(environment, Demonstrates):
        raise ConfigError(f"{name} has no demonstrations to warm-start on; set steps to 0", field="spec.warmStart.steps")
    if settings.right is not None and "right" not in inspect.signature(environment.demonstrations).parameters:
        raise ConfigError(f"how often the demonstrations of {name} are right cannot be chosen; leave it out", field="spec.warmStart.right")


def ready_policy(
    manifest: Manifest, environment: Environment, loaded: LoadedModel, folder: RunFolder, listener: Listener, *, warm: bool
) -> tuple[LoadedModel, LoraPolicy]:
    """The warm-started model and its adapter. `warm` false: a checkpoint will be restored, which has it already."""
    spec = manifest.spec
    base = folder.path / "base"
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is not None and not (folder.path / "tokenizer.json").exists():
        folder.write("tokenizer.json", backend.to_str().encode())
    large = loaded.parameter_count > FULL_PARAMETERS_LIMIT
    if warm and not large and spec.warm_start.steps and isinstance(environment, Demonstrates) and not base.is_dir():
        _warm(manifest, environment, loaded, None, listener)
        _keep(loaded, base)
        loaded = load(str(base))
    policy = LoraPolicy(loaded, spec.parameters.lora, seed=spec.parameters.seed)
    if warm and large and spec.warm_start.steps and isinstance(environment, Demonstrates):
        _warm(manifest, environment, loaded, policy, listener)
    return loaded, policy


def _warm(manifest: Manifest, environment: Demonstrates, loaded: LoadedModel, policy: LoraPolicy | None, listener: Listener) -> None:
    settings = manifest.spec.warm_start
    listener.on_event(StageChanged(stage=RunStage.WARM_START, total=settings.steps))

    def progress(at: WarmStartProgress) -> None:
        listener.on_event(StageAdvanced(done=at.step, note=f"loss {at.loss:.3f}"))

    warm_start(
        loaded,
        environment.demonstrations(settings.seed, **({} if settings.right is None else {"right": settings.right})),
        steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        policy=policy,
        progress=progress,
    )


def _keep(loaded: LoadedModel, base: Path) -> None:
    """Saves the warm-started model as an ordinary folder, whole or not at all."""
    temporary = base.with_name(f".base.{os.getpid()}.tmp")
    with disk_full_named(base):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            loaded.model.save_pretrained(temporary)
            loaded.tokenizer.save_pretrained(temporary)
            os.rename(temporary, base)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
