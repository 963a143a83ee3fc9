"""A TrainingJob's spec as a run's manifest. In: a checked spec and its Environment. Out: the manifest, or a refusal naming the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from sandmill.accounts.prices import PriceBook
from sandmill.config.load import parse_manifest
from sandmill.config.manifest import LoraSection, Manifest
from sandmill.errors import ConfigError
from sandmill.models.names import BUNDLED
from sandmill.server.costs import MACHINE, SANDBOX, usd
from sandmill.server.layer_environments import section_of
from sandmill.server.records import Value
from sandmill.server.refusals import Cause, Refusal, invalid
from sandmill.server.schema import UNSUPPORTED, ascii_of, nearest
from sandmill.server.specs_training import ALL_LINEAR, EVALUATE, GRPO, MODE_OF

_TRAIN: Final = 256
_HELD_OUT: Final = 64
_HUB: Final = "hf://"
_MOST_BETWEEN_CHECKPOINTS: Final = 10
_SANDBOXES: Final = 8


def resolved(spec: Value, environment: Value) -> Value:
    """The spec with what depends on its Environment filled in: mode, numbers of tasks. Raises Refusal."""
    splits = environment["status"].get("splits", {"train": 0, "test": 0})
    asked = spec["environment"]
    train = 0 if spec["runtime"] == EVALUATE else min(_TRAIN, splits["train"])
    sizes = {"trainTasks": asked.get("trainTasks", train), "heldOutTasks": asked.get("heldOutTasks", min(_HELD_OUT, splits["test"]))}
    return {**spec, "mode": spec.get("mode", MODE_OF[spec["runtime"]]), "environment": {**asked, **sizes}}


def as_before(spec: Value, before: Value) -> Value:
    """The spec with what it leaves open as it was resolved in `before`, the stored one."""
    sizes = {key: before["environment"][key] for key in ("trainTasks", "heldOutTasks")}
    return {"mode": before["mode"], **spec, "environment": {**sizes, **spec["environment"]}}


def check(spec: Value, environment: Value, prices: PriceBook) -> None:
    """A resolved spec. Raises Refusal with all causes."""
    causes = [*_mode(spec, environment), *_model(spec["model"]["uri"]), *_sizes(spec, environment), *_batch(spec["parameters"])]
    if spec.get("maxCostUSD") is not None and (missing := [name for name in (MACHINE, SANDBOX) if prices.per_hour(name) is None]):
        message = f"the price book has no price for this, so a cap could not be kept; add hours.{missing[0]} to it"
        causes.append(Cause("spec.maxCostUSD", "FieldValueInvalid", message))
    if causes:
        raise invalid("trainingjobs", "", causes)
    if ALL_LINEAR in (targets := spec["parameters"]["lora"]["targetModules"]) and len(targets) > 1:
        message = f"{ALL_LINEAR} stands for all of them; leave the others out"
        raise invalid("trainingjobs", "", [Cause("spec.parameters.lora.targetModules", "FieldValueInvalid", message)])


def _mode(spec: Value, environment: Value) -> list[Cause]:
    mode, own = spec["mode"], MODE_OF[spec["runtime"]]
    if mode != own:
        return [Cause("spec.mode", "FieldValueInvalid", f"the runtime {spec['runtime']} does {own}, not {mode}; write {own}")]
    modes = environment["spec"]["modes"]
    if mode not in modes:
        message = f"the environment is for {' and '.join(modes)}; add {mode} to its spec.modes in another version"
        return [Cause("spec.environment.name", "FieldValueInvalid", message)]
    return []


def model_of(uri: str) -> str:
    """What the loader calls a model."""
    bare = uri.removeprefix(_HUB)
    return bare if bare.startswith("sandmill/") else uri


def _model(uri: str) -> list[Cause]:
    name = model_of(uri)
    if name.startswith("sandmill/") and name not in BUNDLED:
        message = f"there is no bundled model {ascii_of(name)!r}{nearest(name, list(BUNDLED))}"
        return [Cause("spec.model.uri", "FieldValueNotFound", f"{message}; there are {', '.join(BUNDLED)}")]
    if name.startswith("/") and not (Path(name) / "config.json").is_file():
        return [
            Cause(
                "spec.model.uri", "FieldValueNotFound", "there is no model folder with a config.json at this path of the server's machine"
            )
        ]
    return []


def _sizes(spec: Value, environment: Value) -> list[Cause]:
    splits = environment["status"].get("splits")
    if splits is None:
        return []
    causes = []
    asked, fewest = spec["environment"], spec["evaluation"]["minComparisonTasks"]
    for field, split, least in (("trainTasks", "train", 1), ("heldOutTasks", "test", fewest)):
        if spec["runtime"] == GRPO and asked[field] < least:
            why = "" if least == 1 else " to compare on (evaluation.minComparisonTasks)"
            causes.append(Cause(f"spec.environment.{field}", "FieldValueInvalid", f"must be at least {least}{why}, not {asked[field]}"))
        elif asked[field] > splits[split]:
            message = f"the environment has {splits[split]} {split} tasks, not {asked[field]}; write {splits[split]}"
            causes.append(Cause(f"spec.environment.{field}", "FieldValueInvalid", message))
    return causes


def _batch(parameters: Value) -> list[Cause]:
    whole, group = parameters["batchSize"] * parameters["gradientAccumulation"], parameters["numGenerations"]
    if whole % group == 0:
        return []
    near = max(1, round(whole / group)) * group
    message = f"batchSize x gradientAccumulation is {whole} replies, no whole number of groups of {group}; make it {near}"
    return [Cause("spec.parameters.batchSize", "FieldValueInvalid", message)]


def manifest_of(spec: Value, environment: Value, bundle: Path, prices: PriceBook) -> Manifest:
    """The manifest of a checked and resolved spec; `bundle` is the job's own copy. Raises Refusal."""
    parameters, asked = spec["parameters"], spec["environment"]
    training = spec["runtime"] == GRPO
    section = section_of(bundle, environment["spec"], max(1, asked["trainTasks"]), asked["heldOutTasks"], asked["seed"])
    targets = parameters["lora"]["targetModules"]
    written: dict[str, Any] = {
        "model": {"uri": model_of(spec["model"]["uri"])},
        "environment": msgspec.to_builtins(section),
        "parameters": {
            **{key: parameters[key] for key in ("numGenerations", "learningRate", "maxCompletionLength", "maxTurns", "sampling", "seed")},
            "steps": parameters["steps"] if training else 0,
            "batchSize": parameters["batchSize"] * parameters["gradientAccumulation"] // parameters["numGenerations"],
            "microBatchSize": parameters["batchSize"],
            "lora": {
                **parameters["lora"],
                "targetModules": list(LoraSection().target_modules) if targets == [ALL_LINEAR] else targets,
            },
        },
        "evaluation": {
            "baseline": spec["evaluation"]["baseline"] or not training,
            "final": spec["evaluation"]["final"] and training,
            "greedy": False,
            "minComparisonTasks": spec["evaluation"]["minComparisonTasks"],
        },
        "grading": {"maxParallel": spec["grading"]["maxParallel"], "timeout": environment["spec"]["sandbox"]["timeout"]},
        "resources": {"maxSandboxes": _SANDBOXES},
        "checkpoint": {"every": max(1, min(_MOST_BETWEEN_CHECKPOINTS, parameters["steps"] // 10))},
        "prices": {
            field: usd(price)
            for field, name in (("machinePerHour", MACHINE), ("sandboxPerHour", SANDBOX))
            if (price := prices.per_hour(name)) is not None
        },
    }
    if training and "warmStart" in parameters:
        written["warmStart"] = parameters["warmStart"]
    if "maxCostUSD" in spec:
        written["maxCostUSD"] = spec["maxCostUSD"]
    try:
        return parse_manifest(msgspec.json.encode({"spec": written}), file="manifest.json")
    except ConfigError as error:
        field = error.field or "spec"
        raise Refusal(UNSUPPORTED, f"{field}: {error.message}", causes=[Cause(field, UNSUPPORTED, ascii_of(error.message))]) from error
