"""What the server asks the environments' rooms for. In: a bundle and an Environment's spec. Out: how many tasks it has, and what it is.

The module runs in its package's sandbox only: unpacked there, asked for its tasks there, its reward called there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final, NamedTuple

from sandmill.config.manifest import EnvironmentSection, Option
from sandmill.config.quantities import parse_cpu, parse_duration
from sandmill.environments import foreign
from sandmill.environments.foreign import ForeignEnvironment
from sandmill.environments.formats import plan
from sandmill.environments.packages.install import key_of, remove
from sandmill.environments.packages.interpreter import interpreter
from sandmill.errors import ConfigError, EnvironmentFailed, GraderFailed, ImageError
from sandmill.sandboxes.dual import in_thread
from sandmill.server.bundles import check_bundle
from sandmill.server.records import Value
from sandmill.server.specs_environments import MOST_TASKS

BUNDLE: Final = "bundle.tar.gz"


class Measured(NamedTuple):
    """What a loaded environment is."""

    train: int
    test: int
    digest: str
    image: str


class NotUsable(Exception):
    """An environment that cannot be used. `reason` is a word for programs; the sentence says what to change."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def section_of(bundle: Path, spec: Value, train: int = MOST_TASKS, held_out: int = MOST_TASKS, seed: int = 0) -> EnvironmentSection:
    """How a manifest names it. Blocks. Raises ConfigError for what is no bundle."""
    module = spec["package"]["source"]["module"]
    options: dict[str, Option] = {
        "module": module,
        "memory": spec["sandbox"]["memory"],
        "cpu": parse_cpu(spec["sandbox"]["cpu"]),
    }
    if needed := check_bundle(bundle, module, ".".join(interpreter("").version.split(".")[:2])):
        options["requirements"] = list(needed)
    return EnvironmentSection(name=f"python/{bundle}", train_tasks=train, held_out_tasks=held_out, seed=seed, options=options)


async def measure(bundle: Path, spec: Value) -> Measured:
    """Loads a bundle, reads all its tasks and calls its reward once. Raises NotUsable, SandboxError, OSError."""
    try:
        section = await in_thread(lambda: section_of(bundle, spec))
    except ConfigError as error:
        raise NotUsable("BundleInvalid", error.message) from error
    try:
        environment = await foreign.opened(section.name, section, fit=True)
    except ConfigError as error:
        raise NotUsable("TasksInvalid", _named(error.message, bundle)) from error
    except EnvironmentFailed as error:
        raise NotUsable("LoadFailed", _named(str(error), bundle)) from error
    try:
        train, test = len(environment.splits["train"]), len(environment.splits["heldout"])
        _check_sizes(spec, train, test)
        await _check_reward(environment, parse_duration(spec["sandbox"]["timeout"]))
        return Measured(train, test, f"sha256:{environment.digest}", environment.installed.record.image)
    finally:
        await environment.close()


def _named(message: str, bundle: Path) -> str:
    """Without the path of this machine that the bundle lies at."""
    for spoken in (f"environment python/{bundle.name.removesuffix('.tar.gz')}", f"environment {bundle}", str(bundle)):
        message = message.replace(spoken, "the bundle")
    return message


def _check_sizes(spec: Value, train: int, test: int) -> None:
    for name, found in (("train", train), ("test", test)):
        said = spec.get("splits", {}).get(name, {}).get("size", found)
        if said != found:
            raise NotUsable("SplitsDiffer", f"spec.splits.{name}.size says {said}, and tasks({name!r}) gives {found}; write {found}")


async def _check_reward(environment: ForeignEnvironment, timeout_s: float) -> None:
    """A reward that raises on a task's own answer, or on silence, would fail in every episode."""
    task = environment.splits["train"][0]
    for answer in (environment.expected_answer(task) or "", ""):
        try:
            worker = await environment.service.worker()
            await worker.grade(environment.row(task), answer, {"turns": 1}, timeout_s=timeout_s)
        except (GraderFailed, TimeoutError) as error:
            shown = "an empty reply" if not answer else "the answer of its first task"
            raise NotUsable("RewardFailed", f"reward() cannot grade {shown}: {error}") from error


def forget_package(section: EnvironmentSection) -> None:
    """Frees what was installed for a bundle, unless somebody uses it. Blocks."""
    with contextlib.suppress(ConfigError, EnvironmentFailed, ImageError, OSError):
        remove(key_of(plan(section.name, section).package))
