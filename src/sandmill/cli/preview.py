"""`sandmill train --preview`: a manifest in; the resolved manifest, the size and cost of the run, and what would stop it out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from sandmill.accounts.estimate import Estimate, Plan, estimate
from sandmill.accounts.prices import RunPrices
from sandmill.config.allowed import allowed
from sandmill.config.manifest import Manifest
from sandmill.config.quantities import parse_usd
from sandmill.errors import SandmillError
from sandmill.models.names import UNTRAINED, missing
from sandmill.reports.inert import inert, inert_block
from sandmill.reports.metrics import read_run
from sandmill.reports.words import dollars, duration

RUNS = Path("runs")


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why the run could not start."""

    code: str
    message: str


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would be. `seconds_per_step` comes from an earlier run of the same environment and model here, or is None."""

    manifest: Manifest
    episodes_per_step: int
    training_episodes: int
    evaluation_episodes: int | None
    seconds_per_step: float | None
    estimate: Estimate | None
    blocking_reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()
    """What stops no run but is seldom meant, or could not be looked at."""


def show_preview(manifest: Manifest, *, as_json: bool) -> int:
    """Prints the preview; the exit code is 3 when something would stop the run. Starts nothing and writes nothing."""
    found = preview(manifest)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found), ensure_ascii=True) + "\n")
    else:
        sys.stdout.write(_text(found) + "\n")
    return 3 if found.blocking_reasons else 0


def preview(manifest: Manifest, runs: Path = RUNS) -> Preview:
    """Resolves the environment and looks at this machine; loads no model."""
    parameters, reasons = manifest.spec.parameters, list(_reasons(manifest))
    tasks = _evaluation_tasks(manifest, reasons)
    ways = manifest.spec.evaluation.samples_per_task + manifest.spec.evaluation.greedy
    times = manifest.spec.evaluation.baseline + manifest.spec.evaluation.final
    seconds = measured_seconds_per_step(manifest, runs)
    per_step = parameters.batch_size * parameters.num_generations
    expected = None if seconds is None else estimate(_plan(manifest, seconds))
    cap = manifest.spec.max_cost_usd
    if cap is not None and expected is not None and expected.total_microusd is not None and expected.total_microusd > parse_usd(cap):
        message = f"the run is expected to cost {dollars(expected.total_microusd)}, more than maxCostUSD {dollars(parse_usd(cap))}"
        reasons.append(Reason(code="CostAboveCap", message=message))
    return Preview(
        manifest=manifest,
        episodes_per_step=per_step,
        training_episodes=per_step * parameters.steps,
        evaluation_episodes=None if tasks is None else tasks * ways * times,
        seconds_per_step=seconds,
        estimate=expected,
        blocking_reasons=tuple(reasons),
        notes=(*notes(manifest), *_unseen(manifest)),
    )


def measured_seconds_per_step(manifest: Manifest, runs: Path) -> float | None:
    """The median step of the newest run under `runs` with the same model, environment and step size; None without one."""
    spec = manifest.spec
    folders = sorted((path.parent for path in runs.glob("*/metrics.jsonl")), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in folders:
        try:
            record = read_run(folder)
        except SandmillError:
            continue
        if record.manifest is None or not record.steps:
            continue
        other = record.manifest.spec
        same = (other.model, other.environment.name, other.parameters.batch_size, other.parameters.num_generations)
        if same == (spec.model, spec.environment.name, spec.parameters.batch_size, spec.parameters.num_generations):
            walls = sorted(step.wall_s for step in record.steps)
            return walls[len(walls) // 2]
    return None


def _plan(manifest: Manifest, seconds: float) -> Plan:
    prices = RunPrices.of(manifest.spec.prices)
    return Plan(
        steps=manifest.spec.parameters.steps,
        seconds_per_step=seconds,
        machine_microusd_per_hour=prices.machine_microusd_per_hour,
        sandboxes=manifest.spec.resources.max_sandboxes,
        sandbox_microusd_per_hour=prices.sandbox_microusd_per_hour,
    )


def _evaluation_tasks(manifest: Manifest, reasons: list[Reason]) -> int | None:
    from sandmill.environments import registry
    from sandmill.environments.access.access import access_of
    from sandmill.environments.check import refuse_failing
    from sandmill.models.judging import EmbeddedJudge

    spec = manifest.spec
    try:
        access = access_of(spec.grading, spec.tools, lambda judge: EmbeddedJudge(judge.name, judge.uri or ""))
        environment = registry.get(spec.environment.name, spec.environment, access=access)
        refuse_failing(environment, allow=spec.environment.allow_failing)
    except SandmillError as error:
        reasons.append(Reason(code=type(error).__name__, message=str(error)))
        return None
    missing = [split for split in spec.evaluation.splits if split not in environment.splits]
    if missing:
        message = f"{spec.environment.name} has no split {missing[0]!r}; it has {', '.join(environment.splits)}"
        reasons.append(Reason(code="UnknownSplit", message=message))
    return sum(len(environment.splits[split]) for split in spec.evaluation.splits if split in environment.splits)


def _reasons(manifest: Manifest) -> list[Reason]:
    from sandmill.cli.doctor import machine_findings

    reasons = [Reason(code="MachineNotReady", message=f"{one.name}: {one.says}; {one.fix}") for one in machine_findings() if one.blocks]
    if (message := missing(manifest.spec.model.uri)) is not None:
        reasons.append(Reason(code="ModelNotFound", message=message))
    return reasons


def notes(manifest: Manifest) -> tuple[str, ...]:
    """What stops no run but is seldom meant, a sentence each."""
    uri, found = manifest.spec.model.uri, []
    if uri in UNTRAINED and not manifest.spec.warm_start.steps:
        found.append(f"{uri} starts untrained and spec.warmStart.steps is 0: it will solve next to nothing (examples/ have warm starts)")
    return tuple(found)


def _unseen(manifest: Manifest) -> tuple[str, ...]:
    uri = manifest.spec.model.uri
    return (f"whether {uri} can be had is seen only when it is fetched",) if uri.startswith("hf://") else ()


def _text(found: Preview) -> str:
    spec, resolved = found.manifest.spec, msgspec.json.format(msgspec.json.encode(found.manifest), indent=2).decode()
    lines = [inert_block(resolved), ""]
    training = f"{found.training_episodes:,} episodes in {spec.parameters.steps} steps of {found.episodes_per_step}"
    evaluation = "unknown" if found.evaluation_episodes is None else f"{found.evaluation_episodes:,} episodes"
    lines += [f"training    {training}", f"evaluation  {evaluation}"]
    lines += [inert(f"graders     may {what}") for what in allowed(spec)]
    if found.estimate is None:
        lines.append("time, cost  unknown: no earlier run here has measured a step of this kind")
    else:
        money = f"machine {dollars(found.estimate.machines_microusd)}, sandboxes {dollars(found.estimate.sandboxes_microusd)}"
        lines.append(
            f"time        {duration(found.estimate.seconds)} of training at {found.seconds_per_step:.2f} s a step, as measured here"
        )
        besides = "; what judges are asked comes on top" if spec.grading.judge else ""
        lines.append(f"cost        {dollars(found.estimate.total_microusd)} ({money}){besides}")
    lines += [inert(f"would not start: {reason.message}") for reason in found.blocking_reasons]
    lines += [inert(f"note: {note}") for note in found.notes]
    return "\n".join([*lines, *([] if found.blocking_reasons else ["nothing would stop this run"])])
