"""Checkpoints: the state of a run between two steps, written whole or not at all, and verified before it is believed.

    checkpoints/step-000010/
      MANIFEST               sha256 of every other file, as `sha256sum -c` reads it
      state.json             CheckpointState
      learner.safetensors    weights, moments, generator
      adapter/               the adapter as plain peft reads it

A checkpoint is made under a dotted name, synced, and renamed: whatever has the name `step-...` is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from sandmill.errors import CheckpointCorrupt, RunIncompatible
from sandmill.models.policy import Policy
from sandmill.store import RunFolder, disk_full_named, sync_folder
from sandmill.training.learner import Learner

SCHEMA_VERSION = 1
_NAME = re.compile(r"step-(\d{6,})")
_REQUIRED = {"state.json", "learner.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"}


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands. `offsets` is filled in by `save_checkpoint`."""

    step: int
    """Training steps done."""
    environment_digest: str
    model_digest: str
    """Of the frozen base weights, after a warm start if there was one."""
    trained_positions: tuple[int, ...] = ()
    """Positions, in the seeded order of tasks, of the groups trained on: not a cursor, so what was in flight is sampled again."""
    seeds: Mapping[str, int] = {}
    elapsed_s: float = 0.0
    """Seconds on the run's clock."""
    offsets: Mapping[str, int] = {}
    """Length in bytes of every stream of the run folder."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory."""

    folder: Path
    state: CheckpointState
    learner: Mapping[str, torch.Tensor]


def save_checkpoint(run: RunFolder, state: CheckpointState, policy: Policy, learner: Learner, *, keep: int) -> Path:
    """Writes the checkpoint of `state.step`, then removes all but the newest `keep`. Raises DiskFull with the older ones intact."""
    parent = run.path / "checkpoints"
    final = parent / f"step-{state.step:06d}"
    complete = msgspec.structs.replace(state, offsets=run.offsets())
    with disk_full_named(final, "the checkpoints before it are intact"), _full_disk_of_safetensors():
        parent.mkdir(exist_ok=True)
        with _new_folder(final) as folder:
            _write_adapter(policy, folder / "adapter")
            (folder / "learner.safetensors").write_bytes(save(learner.state_dict()))
            (folder / "state.json").write_bytes(msgspec.json.encode(complete) + b"\n")
            names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            digests = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
            (folder / "MANIFEST").write_text("".join(digests))
    for old in checkpoints(run.path)[:-keep]:
        _remove(old)
    return final


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, unverified."""
    parent = run / "checkpoints"
    found = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies one checkpoint. Raises CheckpointCorrupt naming the file and the newest good checkpoint to use instead."""
    try:
        return _verified(folder)
    except CheckpointCorrupt as error:
        good = _newest_good(folder)
        way = (
            f"remove {folder} and --resume goes on from {good.name}"
            if good
            else "no other checkpoint is whole, so the run has to start anew"
        )
        raise CheckpointCorrupt(f"{error}; {way}") from None


def restore(run: RunFolder, learner: Learner, *, environment_digest: str, model_digest: str) -> CheckpointState | None:
    """Takes the newest checkpoint into `learner` and its policy and the streams back to it; None (streams emptied) when there is none.

    Raises CheckpointCorrupt, and RunIncompatible when the environment or the base model is not the one that was trained on.
    """
    _sweep(run.path)
    found = checkpoints(run.path)
    if not found:
        run.truncate({})
        return None
    checkpoint = load_checkpoint(found[-1])
    for what, then, now in (
        ("environment", checkpoint.state.environment_digest, environment_digest),
        ("base model", checkpoint.state.model_digest, model_digest),
    ):
        if then != now:
            raise RunIncompatible(f"{run.path} was trained on another {what} (digest {then[:12]} then, {now[:12]} now); start a new run")
    run.truncate(checkpoint.state.offsets)
    learner.load_state_dict(checkpoint.learner)
    return checkpoint.state


def export_adapter(run: RunFolder, policy: Policy) -> Path:
    """Writes the trained adapter to `adapter/` in the run folder, as plain transformers + peft read it. Raises DiskFull."""
    final = run.path / "adapter"
    with disk_full_named(final), _full_disk_of_safetensors(), _new_folder(final) as folder:
        _write_adapter(policy, folder)
    return final


@contextlib.contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """A folder that takes the name `final` only when the block has ended and everything in it is on disk."""
    folder = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    _remove(folder)
    folder.mkdir()
    try:
        yield folder
        for path in (*folder.rglob("*"), folder):
            _sync(path)
        if final.exists():
            _remove(final)
        os.rename(folder, final)
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_adapter(policy: Policy, folder: Path) -> None:
    """peft lists target modules in the order of a set, which changes from process to process: sorted, equal runs give equal files."""
    policy.save_adapter(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = folder / "adapter_config.json"
    settings = json.loads(config.read_bytes())
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"].sort()
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _verified(folder: Path) -> Checkpoint:
    recorded = _recorded_digests(folder)
    content: dict[str, bytes] = {}
    for name, digest in recorded.items():
        try:
            content[name] = (folder / name).read_bytes()
        except OSError as error:
            raise CheckpointCorrupt(f"{folder / name} cannot be read ({error.strerror})") from None
        if hashlib.sha256(content[name]).hexdigest() != digest:
            raise CheckpointCorrupt(f"{folder / name} does not match its recorded digest")
    try:
        state = msgspec.json.decode(content["state.json"], type=CheckpointState)
        return Checkpoint(folder, state, load(content["learner.safetensors"]))
    except (msgspec.DecodeError, SafetensorError, ValueError) as error:
        raise CheckpointCorrupt(f"{folder} is of another version: {error}") from None


def _recorded_digests(folder: Path) -> dict[str, str]:
    path = folder / "MANIFEST"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise CheckpointCorrupt(f"{path} cannot be read") from None
    recorded = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if missing := sorted(_REQUIRED - set(recorded)):
        raise CheckpointCorrupt(f"{path} is truncated: it does not list {missing[0]}")
    if any(".." in Path(name).parts or Path(name).is_absolute() for name in recorded):
        raise CheckpointCorrupt(f"{path} names a file outside the checkpoint")
    return recorded


def _newest_good(bad: Path) -> Path | None:
    for folder in reversed(checkpoints(bad.parent.parent)):
        if folder != bad:
            with contextlib.suppress(CheckpointCorrupt):
                return _verified(folder).folder
    return None


@contextlib.contextmanager
def _full_disk_of_safetensors() -> Iterator[None]:
    """safetensors reports a full disk as an error of its own, with the number of the system's error in its text."""
    try:
        yield
    except SafetensorError as error:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if f"os error {number})" in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise


def _sweep(run: Path) -> None:
    """Removes what a kill left half-made or half-removed."""
    for parent in (run, run / "checkpoints"):
        for path in (*parent.glob(".*.tmp"), *parent.glob(".*.old")):
            _remove(path)


def _remove(path: Path) -> None:
    """Removes a file or folder; a folder loses its name first, so that none is ever seen half-removed."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.{os.getpid()}.old")
    if hidden != path:
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
