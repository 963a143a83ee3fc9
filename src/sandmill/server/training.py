"""The training controller. In: TrainingJob objects. Out: each trained in a process of its own, one after the other.

    <state>/training/<uid>/    bundle.tar.gz  manifest.json  run/  events.jsonl  trainer.log  outputs/

A trainer dies with the server. The next server takes a job up at its newest checkpoint: the same bits as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from sandmill.config.load import load_manifest
from sandmill.config.quantities import parse_usd
from sandmill.errors import SandmillError
from sandmill.rollouts.events import EvaluationFinished, EvaluationPhase, RunStage, StageChanged, StepFinished
from sandmill.sandboxes.dual import in_thread
from sandmill.server.background import Background
from sandmill.server.costs import MACHINE, book_version, usd
from sandmill.server.environments import Environments
from sandmill.server.events import Events
from sandmill.server.layer_environments import forget_package
from sandmill.server.records import Records, Value, fine_stamp
from sandmill.server.refusals import Cause, Refusal, invalid
from sandmill.server.schema import ascii_of
from sandmill.server.settings import Settings
from sandmill.server.specs_training import GRPO
from sandmill.server.statuses import condition
from sandmill.server.trainer import EVENTS, MANIFEST, OUTPUTS, RUN, RunEnded, RunFailed
from sandmill.server.trainer_process import TrainerProcess
from sandmill.server.training_manifest import as_before, check, manifest_of, resolved
from sandmill.server.training_results import diagnostics, figures, metrics, phase_summary, summary

ENDED: Final = ("Succeeded", "Failed", "Cancelled")
_AT_ONCE: Final = 1
"""A training takes what its machine has."""
_WISHED: Final = {"Cancelled": "it was cancelled; what it had written is kept", "Suspended": "everything is saved"}
_log = logging.getLogger("sandmill.server")


class TrainingJobs:
    """All training jobs of the server. On the event loop only."""

    def __init__(self, records: Records, events: Events, environments: Environments, settings: Settings) -> None:
        self._records = records
        self._events = events
        self._environments = environments
        self._settings = settings
        self._folder = settings.folder / "training"
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._work = Background()
        self._live: dict[str, TrainerProcess] = {}
        """By the job's uid."""

    def complete(self, project: str, spec: Value, existing: Value | None) -> Value:
        """The spec with what its Environment decides filled in, as in the `existing` one of its name. Raises Refusal."""
        if existing is not None:
            return as_before(spec, existing["spec"])
        return resolved(spec, self._environment(project, spec))

    def admit(self, project: str, spec: Value) -> None:
        """Whether such a job can be run. Raises Refusal."""
        check(spec, self._environment(project, spec), self._settings.prices)

    def check_now(self, project: str, spec: Value) -> None:
        """Whether it can be run at this moment. Raises Refusal."""
        if reasons := self._blocking(project, spec):
            raise invalid("trainingjobs", "", [Cause("spec.environment.name", reasons[0]["code"], reasons[0]["message"])])

    def estimate(self, project: str, spec: Value) -> Value:
        """`status.estimate`. How long it takes is not known beforehand; the hourly rate and the cap are."""
        out: Value = {"pricebookVersion": book_version(self._settings.prices), "blockingReasons": self._blocking(project, spec)}
        if (rate := self._settings.prices.per_hour(MACHINE)) is not None:
            out["rateUSDPerHour"] = usd(rate)
        if (limit := spec.get("maxCostUSD")) is not None:
            out |= {"holdUSD": usd(parse_usd(limit)), "costUSD": {"p90": usd(parse_usd(limit))}}
        return out

    def soon(self, value: Value) -> None:
        """Runs it as soon as there is room; how it goes is in its object."""
        if (uid := value["metadata"]["uid"]) not in self._work:
            self._work.start(uid, self._run(value), lambda error: self._over(value, error))

    def check_change(self, before: Value, value: Value) -> None:
        """What may become of `spec.state`. Raises Refusal (Conflict)."""
        was, wanted, phase = before["spec"]["state"], value["spec"]["state"], before["status"]["phase"]
        if was != wanted and (phase in ENDED or was == "Cancelled"):
            raise Refusal("Conflict", f"the job is {phase if phase in ENDED else was} for good; create another", kind="trainingjobs")

    async def changed(self, before: Value, value: Value) -> None:
        """Its state was changed."""
        uid, wanted = value["metadata"]["uid"], value["spec"]["state"]
        if wanted == before["spec"]["state"]:
            return
        live = self._live.get(uid)
        if wanted == "Running":
            self._again(value)
        elif live is not None:
            live.stop(at_once=wanted == "Cancelled")
        elif await self._work.stop(uid) or self._status(value).get("phase") not in ENDED:
            self._rest(value, wanted)

    async def forget(self, value: Value) -> None:
        """Its object was removed: its process ends, and everything that it wrote goes."""
        uid = value["metadata"]["uid"]
        await self._work.stop(uid)
        folder, named = self._folder / uid, value["spec"]["environment"]["name"]
        alike = any(other["spec"]["environment"]["name"] == named for other in self._records.each("TrainingJob"))
        needed = alike or self._environments.has(value["metadata"]["namespace"], named)

        def free() -> None:
            with contextlib.suppress(SandmillError, OSError):  # it never came so far
                if not needed:
                    forget_package(load_manifest(folder / MANIFEST).spec.environment)
            shutil.rmtree(folder, ignore_errors=True)

        await in_thread(free)

    def recover(self) -> None:
        """After a restart: goes on with what has not ended; what belongs to no object goes."""
        known = set()
        for value in self._records.each("TrainingJob"):
            known.add(value["metadata"]["uid"])
            if value["status"]["phase"] in ENDED:
                continue
            if value["spec"]["state"] == "Running":
                self.soon(value)
            else:
                self._rest(value, value["spec"]["state"])
        for left in self._folder.glob("*"):
            if left.name not in known:
                shutil.rmtree(left, ignore_errors=True)

    async def close(self) -> None:
        """Ends every trainer; the next server goes on with their jobs."""
        await self._work.close()

    def events_of(self, value: Value) -> Path:
        """The file of its task events."""
        return self._folder / str(value["metadata"]["uid"]) / EVENTS

    def outputs_of(self, value: Value) -> Path:
        """The folder of its outputs."""
        return self._folder / str(value["metadata"]["uid"]) / OUTPUTS

    def _environment(self, project: str, spec: Value) -> Value:
        return self._environments.find(project, spec["environment"]["name"], "spec.environment.name")

    def _blocking(self, project: str, spec: Value) -> list[dict[str, str]]:
        status = self._environment(project, spec)["status"]
        if status["phase"] == "Ready":
            return []
        why = f": {status['message']}" if "message" in status else ""
        name = spec["environment"]["name"]
        return [
            {
                "code": "EnvironmentNotReady",
                "message": f"environment {name} is {status['phase']}{why}",
                "fix": "wait until it is Ready" if status["phase"] == "Pending" else "mend it under a higher version",
            }
        ]

    async def _run(self, value: Value) -> None:
        folder = self._folder / str(value["metadata"]["uid"])
        if value["spec"]["state"] != "Running":
            self._rest(value, value["spec"]["state"])
            return
        place = asyncio.ensure_future(self._room.acquire())  # before anything is awaited: jobs run in the order in which they came
        try:
            await in_thread(lambda: self._prepare(value, folder))
            await place
            await self._train(value, folder)
        except Refusal as refusal:
            self._failed(value, refusal.reason, refusal.message)
        except (SandmillError, OSError) as error:
            self._failed(value, "InfrastructureFailed", ascii_of(str(error)))
        finally:
            await self._leave(place)

    async def _leave(self, place: asyncio.Future[Literal[True]]) -> None:
        """Gives a place back, or no longer waits for one."""
        place.cancel()
        await asyncio.wait([place])
        if not place.cancelled():
            self._room.release()

    def _prepare(self, value: Value, folder: Path) -> None:
        """Everything that the run needs, in its own folder: an environment may be deleted meanwhile. Blocks."""
        if (folder / MANIFEST).exists():
            return
        environment = self._environment(value["metadata"]["namespace"], value["spec"])
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        source = self._environments.bundle(environment)
        bundle = folder / source.name
        shutil.copyfile(source, bundle)
        manifest = manifest_of(value["spec"], environment, bundle, self._settings.prices)
        fresh = folder / ".manifest"
        fresh.write_bytes(msgspec.json.encode(manifest))
        fresh.rename(folder / MANIFEST)

    async def _train(self, value: Value, folder: Path) -> None:
        """One start of its trainer, to its end."""
        uid, attempt = value["metadata"]["uid"], value["status"].get("attempt", 0) + 1
        began = value["status"].get("startTime", fine_stamp(time.time()))
        self._put(value, phase="Running", job=value["metadata"]["name"], attempt=attempt, startTime=began)
        self._events.note(value, "Started", f"attempt {attempt}")
        async with TrainerProcess.started(folder, attempt) as live:
            self._live[uid] = live
            try:
                async for event in live.events():
                    self._tell(value, event)
                code = await live.ended()
            finally:
                del self._live[uid]
        await self._settle(value, folder, live, code)

    def _tell(self, value: Value, event: object) -> None:
        """What a trainer said, as status."""
        if isinstance(event, StageChanged):
            stage = {RunStage.TRAINING: "Training", RunStage.SAVING: "Exporting"}.get(event.stage)
            if event.stage is RunStage.EVALUATING:
                first = value["spec"]["runtime"] == GRPO and "metrics" not in self._status(value)
                stage = "Baseline" if first else "Evaluating"
            if stage is not None:
                self._put(value, progress={"stage": stage})
        elif isinstance(event, StepFinished):
            self._put(value, metrics=metrics(event), cost=self._cost(value, event.cost_microusd, final=False))
        elif isinstance(event, EvaluationFinished) and event.phase is EvaluationPhase.BEFORE and value["spec"]["runtime"] == GRPO:
            self._put(value, summary={"baseline": phase_summary(event)})

    async def _settle(self, value: Value, folder: Path, live: TrainerProcess, code: int) -> None:
        """The process has ended: what it came to, read from what it wrote."""
        said, wanted = live.last, self._wanted(value)
        done: Value = {"completionTime": fine_stamp(time.time())}
        found = None
        if (folder / RUN / "format").exists():
            found = await in_thread(lambda: figures(folder / RUN))
            fewest, training = value["spec"]["evaluation"]["minComparisonTasks"], value["spec"]["runtime"] == GRPO
            done["summary"] = summary(found, fewest, training=training)
            if training:
                done["diagnostics"] = diagnostics(found.steps)
            spent = said.summary.cost_microusd if isinstance(said, RunEnded) else found.steps[-1].cost_microusd if found.steps else None
            done["cost"] = self._cost(value, spent, final=not live.asked or wanted == "Cancelled")
        if wanted == "Cancelled":
            self._put(value, **done, phase="Cancelled", reason="Requested", message=_WISHED["Cancelled"])
        elif isinstance(said, RunEnded) and not said.summary.interrupted:
            await self._succeeded(value, folder, done)
        elif live.asked and not isinstance(said, RunFailed):
            cost = {key: done[key] for key in ("cost",) if key in done}
            self._put(value, **cost, phase="Suspended", reason="Requested", message=_WISHED["Suspended"])
        elif isinstance(said, RunEnded):
            why = found.warnings[-1] if found is not None and found.warnings else "it stopped before its last step"
            self._failed(value, "StoppedEarly", ascii_of(why), **done)
        elif isinstance(said, RunFailed):
            self._failed(value, said.reason, ascii_of(said.message).replace(str(folder / "bundle.tar.gz"), "the bundle"), **done)
        else:
            ending = "signal 9, as when memory runs out" if code == -9 else f"signal {-code}" if code < 0 else f"exit code {code}"
            self._failed(value, "TrainerDied", ascii_of(f"its process ended with {ending}: {live.complaint()}"), **done)

    async def _succeeded(self, value: Value, folder: Path, done: Value) -> None:
        results = {"name": value["metadata"]["name"], "metrics": self._status(value).get("metrics"), **done}
        outputs = folder / OUTPUTS

        def keep() -> list[dict[str, Any]]:
            (outputs / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
            return listed(outputs)

        made = await in_thread(keep)
        conditions = [condition("Complete", "True", "Succeeded", "it has ended")]
        self._put(value, **done, phase="Succeeded", outputs=made, conditions=conditions)
        self._events.note(value, "Succeeded", f"{len(made)} outputs")

    def _cost(self, value: Value, spent_microusd: int | None, *, final: bool) -> Value:
        out: Value = {"final": final}
        if spent_microusd is not None:
            out["totalUSD"] = usd(spent_microusd)
        if (limit := value["spec"].get("maxCostUSD")) is not None:
            out["limitUSD"] = usd(parse_usd(limit))
        return out

    def _again(self, value: Value) -> None:
        """It runs again; one that is just stopping, once it has stopped."""
        if value["metadata"]["uid"] not in self._work:
            self._put(value, phase="Pending")
            self.soon(value)

    def _rest(self, value: Value, wanted: str) -> None:
        """It does not run, as somebody wished."""
        self._put(value, phase=wanted, reason="Requested", message=_WISHED[wanted])

    def _failed(self, value: Value, reason: str, message: str, **status: Any) -> None:
        self._events.note(value, reason, message, warning=True)
        conditions = [condition("Complete", "False", reason, message)]
        self._put(value, **status, phase="Failed", reason=reason, message=message, conditions=conditions)

    def _stored(self, value: Value) -> Value | None:
        meta = value["metadata"]
        stored = self._records.get("TrainingJob", meta["namespace"], meta["name"])
        return stored if stored is not None and stored["metadata"]["uid"] == meta["uid"] else None

    def _status(self, value: Value) -> Value:
        stored = self._stored(value)
        return {} if stored is None else dict(stored["status"])

    def _wanted(self, value: Value) -> str:
        stored = self._stored(value)
        return "Cancelled" if stored is None else str(stored["spec"]["state"])

    def _put(self, value: Value, **status: Any) -> None:
        if (stored := self._stored(value)) is not None:
            kept = {key: part for key, part in stored["status"].items() if key not in ("reason", "message")}
            seen = {"observedGeneration": stored["metadata"].get("generation", 1)}
            self._records.put("TrainingJob", stored["metadata"]["namespace"], {**stored, "status": {**kept, **status, **seen}})

    def _over(self, value: Value, error: BaseException | None) -> None:
        if error is not None:
            _log.error("a training job could not be run", exc_info=error)
            self._failed(value, "InternalError", "the server made a mistake; its log says where")
        elif self._wanted(value) == "Running" and self._status(value).get("phase") == "Suspended":
            self._again(self._stored(value) or value)  # it was asked to go on while it was stopping


def listed(outputs: Path) -> list[dict[str, Any]]:
    """`status.outputs`. Blocks."""
    files = sorted(path for path in outputs.rglob("*") if path.is_file() and not path.is_symlink())
    return [{"name": path.relative_to(outputs).as_posix(), "sizeBytes": path.stat().st_size} for path in files]
