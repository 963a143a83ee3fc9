"""The published SDK's and command line's calls about environments and training, in an order in which one leads to the next."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from client_calls import Work, sdk
from client_cli_calls import cli

MODEL = "sandmill/tiny-text"
SMALL: dict[str, Any] = {"max_turns": 1, "warm_start": {"steps": 8, "batchSize": 8}}
TASKS = [(f"Say {word} ({n})", word) for n in range(20) for word in "ab"]


def reward(completion: str, answer: str) -> float | None:
    """Whether it begins with the right letter."""
    said = completion.strip()
    return None if not said else 1.0 if said[0] == answer else 0.0


@sdk('rl.train(tasks, reward, model="sandmill/tiny-text", steps=, group_size=, groups_per_step=, max_tokens=, learning_rate=)')
def _(work: Work) -> None:
    from nodus.recipes import rl

    with contextlib.redirect_stdout(io.StringIO()) as said:
        work["run"] = rl.train(
            TASKS, reward, model=MODEL, steps=2, group_size=4, groups_per_step=2, max_tokens=8, learning_rate=2e-3, **SMALL
        )
    assert "packaging the reward and 40 tasks" in said.getvalue()


@sdk("run.watch(every=)")
def _(work: Work) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        work["run"].watch(every=0.05)  # a stage that is over between two looks is not told; steps always are
    assert "Baseline" in said.getvalue(), said.getvalue()
    assert "step 1: reward" in said.getvalue()
    assert "step 2: reward" in said.getvalue()


@sdk("run.wait(), run.status(), run.summary.comparison")
def _(work: Work) -> None:
    assert work["run"].wait(timeout=240).phase == "Succeeded"
    assert work["run"].status().metrics.step == 2
    assert work["run"].summary.baseline.tasks == 16
    assert isinstance(work["run"].summary.comparison.comparable, bool)


@sdk("run.tasks(phase=, outcome=)")
def _(work: Work) -> None:
    assert len(work["run"].tasks(phase="Baseline")) == 16
    assert {task.outcome for task in work["run"].tasks(outcome="Failed")} <= {"Failed"}


@sdk('run.outputs.list(), .download(dir), .download(dir, prefix="adapter/"), ["results.json"].download(path)')
def _(work: Work) -> None:
    outputs, folder = work["run"].outputs, Path(work["folder"], "outputs")
    assert {"adapter/adapter_model.safetensors", "report.html", "results.json"} <= {one["name"] for one in outputs.list()}
    outputs.download(folder)
    outputs.download(folder / "only", prefix="adapter/")
    outputs["results.json"].download(folder / "again.json")
    assert json.loads((folder / "again.json").read_text())["summary"]["baseline"]["tasks"] == 16
    assert (folder / "only" / "adapter_config.json").exists()


@sdk("nodus.api.list, watch of Environment; nodus.Client().download_blob of its bundle")
def _(work: Work) -> None:
    import nodus

    (value,) = nodus.api.list("Environment")
    assert value["status"]["splits"] == {"train": 24, "test": 16}
    work["environment"] = value
    for event in nodus.api.watch("Environment"):
        assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", value["metadata"]["name"])
        break
    blob = value["spec"]["package"]["source"]["blob"]
    work["bundle"] = nodus.Client().download_blob(blob)
    assert work["bundle"][:2] == b"\x1f\x8b"
    manifest = {key: value[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "applied"}}
    Path(work["folder"], "environment.yaml").write_text(json.dumps(manifest))
    job = {
        "apiVersion": "nodus.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": "long"},
        "spec": {
            "runtime": "nodus/grpo-lora",
            "model": {"uri": f"hf://{MODEL}"},
            "environment": {"name": "applied@1.0.0"},
            "parameters": {"steps": 1000, "maxCompletionLength": 8, "maxTurns": 1},
        },
    }
    Path(work["folder"], "job.yaml").write_text(json.dumps(job))


@sdk("rl.train of what fails here: a reward that needs what it left behind raises Invalid")
def _(work: Work) -> None:
    import nodus
    from nodus.recipes import rl

    def other(completion: str, answer: str) -> float:
        return undefined(completion)  # type: ignore[name-defined,no-any-return]  # noqa: F821

    with pytest.raises(nodus.errors.Invalid, match="undefined"):
        rl.train(TASKS, other, model=MODEL)


@sdk("rl.grpo_lora(...).preview(): .estimate, .etag, .blocking, .object; .run() binds it; run.cancel()")
def _(work: Work) -> None:
    import nodus
    from nodus.recipes import rl

    name = work["environment"]["metadata"]["name"]
    lora = rl.LoRA(r=8, target_modules="all-linear")
    plan = rl.grpo_lora(model={"uri": f"hf://{MODEL}"}, environment=f"{name}@1.0.0", steps=500, held_out=16, lora=lora, **SMALL).preview()
    assert (plan.blocking, plan.object.spec.environment.trainTasks) == ([], 24)
    assert plan.etag
    assert plan.estimate.pricebook_version
    run = plan.run(idempotency_key="once")
    run.cancel()
    with pytest.raises(nodus.errors.JobFailed, match="Requested"):
        run.wait(timeout=240)
    assert plan.run(idempotency_key="once").name == run.name


@sdk("rl.evaluate(model=, environment=, held_out=).run().wait().summary")
def _(work: Work) -> None:
    from nodus.recipes import rl

    name = work["environment"]["metadata"]["name"]
    run = rl.evaluate(model=MODEL, environment=f"{name}@1.0.0", held_out=16, max_completion_length=8, max_turns=1).run()
    assert run.wait(timeout=240).summary.evaluation.tasks == 16


@sdk('client.upload_blob, client.create of an Environment in the project nodus; TrainingJob.from_example("nodus/NAME:EXAMPLE").preview()')
def _(work: Work) -> None:
    import nodus
    from nodus.recipes import TrainingJob

    client = nodus.Client()
    client.upload_blob(work["bundle"], "application/gzip", "nodus")
    spec = work["environment"]["spec"]
    example = {"name": "trained", "mode": "Train", "runtime": "nodus/grpo-lora", "model": f"hf://{MODEL}", "tasks": 16}
    shared = spec | {"examples": [example], "splits": {"train": {"size": 24}, "test": {"size": 16}}}
    client.create({"kind": "Environment", "metadata": {"name": "words"}, "spec": shared}, project="nodus")
    for event in nodus.api.watch("Environment", project="nodus"):
        if event["object"]["status"]["phase"] != "Pending":
            break
    assert TrainingJob.from_example("nodus/words:trained").preview().object.spec.environment.name == "nodus/words@1.0.0"
    nodus.api.delete("Environment", "words", project="nodus")


@sdk('rl.train(..., gpu="H100")', refused="Unsupported", why="the job runs on the server's own machine")
def _(work: Work) -> None:
    from nodus.recipes import rl

    rl.train(f"{work['environment']['metadata']['name']}@1.0.0", model=MODEL, gpu="H100")


@sdk('rl.train(..., pool="mine")', refused="Unsupported", why="the job runs on the server's own machine")
def _(work: Work) -> None:
    from nodus.recipes import rl

    rl.train(f"{work['environment']['metadata']['name']}@1.0.0", model=MODEL, pool="mine")


@sdk("rl.train(..., max_cost=) without a price", refused="Invalid", why="a cap needs hours.machine in the server's price book")
def _(work: Work) -> None:
    from nodus.recipes import rl

    rl.train(f"{work['environment']['metadata']['name']}@1.0.0", model=MODEL, max_cost=2)


@sdk('rl.evaluate(tasks=["arc_easy"])', refused="Invalid", why="benchmarks by name are not installed; evaluate on an environment")
def _(work: Work) -> None:
    from nodus.recipes import rl

    rl.evaluate(model=MODEL, tasks=["arc_easy"]).run()


@sdk("finetune.sft(...).preview()", refused="Invalid", why="runtimes are nodus/grpo-lora and nodus/evaluate")
def _(work: Work) -> None:
    from nodus.recipes import finetune

    finetune.sft(model=MODEL, data=finetune.Data("rows")).preview()


cli("nodus apply -f FILE of an Environment", "apply", "-f", "environment.yaml", out="environment/applied created")
cli("nodus wait environment/NAME", "wait", "environment/applied", "--for=condition=Ready", "--timeout", "60s", out="condition met")
cli("nodus apply -f FILE of an Environment, again", "apply", "-f", "environment.yaml", out="environment/applied unchanged")
cli("nodus get environments", "get", "environments", out=r"applied +1.0.0 +Ready +24 +16")
cli("nodus get env/NAME -o yaml", "get", "env/applied", "-o", "yaml", out="kind: Environment")
cli("nodus describe environment/NAME", "describe", "environment/applied", out="24 train and 16 test tasks")
cli(
    "nodus patch of a version's bundle",
    *("patch", "env/applied", "--patch", '{"spec":{"sandbox":{"memory":"2Gi"}}}'),
    code=1,
    err="write a higher spec.version",
)
cli("nodus explain environment.spec", "explain", "environment.spec.package", out="source")
cli("nodus apply -f FILE of a TrainingJob", "apply", "-f", "job.yaml", out="trainingjob/long created")
cli(
    "nodus wait trainingjob/NAME",
    *("wait", "trainingjob/long", "--for=jsonpath={.status.phase}=Running", "--timeout", "60s"),
    out="condition met",
)
cli("nodus apply -f FILE of a TrainingJob, again", "apply", "-f", "job.yaml", out="trainingjob/long unchanged")
cli("nodus get trainingjobs", "get", "trainingjobs", out=r"long +Running")
cli("nodus describe trainingjob/NAME", "describe", "trainingjob/long", out="Running")
cli("nodus suspend trainingjob/NAME", "suspend", "trainingjob/long", out="suspend")
cli("nodus resume trainingjob/NAME", "resume", "trainingjob/long", out="resum")
cli("nodus cancel trainingjob/NAME", "cancel", "trainingjob/long", out="cancel")
cli(
    "nodus wait for a cancelled trainingjob",
    *("wait", "trainingjob/long", "--for=jsonpath={.status.phase}=Cancelled", "--timeout", "60s"),
    out="condition met",
)
cli("nodus events --for trainingjob/NAME", "events", "--for", "trainingjob/long", out="Started")
cli("nodus explain trainingjob.spec", "explain", "trainingjob.spec.parameters", out="numGenerations")
cli("nodus delete trainingjob/NAME", "delete", "trainingjob/long", out="deleted")
cli("nodus delete environment/NAME", "delete", "environment/applied", out="deleted")
cli("nodus get trainingruntimes -p nodus", "get", "trainingruntimes", "-p", "nodus", out=r"grpo-lora +GRPO +Train +Ready")
