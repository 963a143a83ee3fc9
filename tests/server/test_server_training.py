"""TrainingJobs: trained for real, one after the other; stopped, killed and taken up again without a lost record or a left process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundles import SUMS, create, ready, spec_of
from server_process import Answer, Server, serving

JOBS = "/apis/nodus.dev/v1beta1/namespaces/default/trainingjobs"
MERGE = {"Content-Type": "application/merge-patch+json"}
WORDS = """
def tasks(split):
    return [{"prompt": f"Say {word} ({split} {n})", "answer": word} for n in range(10) for word in "ab"]


def reward(completion, answer):
    return 1.0 if completion.strip()[:1] == answer else 0.0
"""
BROKEN = WORDS.replace("    return 1.0", "    if completion not in ('', answer): raise KeyError('x')\n    return 1.0")
SMALL = {
    "numGenerations": 4,
    "batchSize": 4,
    "gradientAccumulation": 2,
    "learningRate": 2e-3,
    "maxCompletionLength": 8,
    "maxTurns": 1,
    "warmStart": {"steps": 8, "batchSize": 8},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a price for its machine, and environments to train on."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "prices.yaml").write_text("hours: {machine: '1.00', sandbox: '0.01'}\n")
    with serving(folder, "--prices", str(folder / "prices.yaml")) as server:
        ready(server, "words", WORDS)
        ready(server, "broken", BROKEN)
        yield server


def job_spec(tasks: str = "words@1.0.0", **spec: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"runtime": "nodus/grpo-lora", "model": {"uri": "hf://sandmill/tiny-text"}}
    given |= {"environment": {"name": tasks, "heldOutTasks": 16}, "parameters": {"steps": 2, **SMALL}}
    return given | spec


def post(server: Server, name: str, spec: dict[str, Any], query: str = "", headers: dict[str, str] | None = None) -> Answer:
    return server.ask("POST", f"{JOBS}{query}", {"metadata": {"name": name}, "spec": spec}, headers)


def until(server: Server, name: str, *phases: str, step: int = 0) -> dict[str, Any]:
    """The job in one of these phases, or past them."""
    deadline = time.monotonic() + 240
    while True:
        value: dict[str, Any] = server.ask("GET", f"{JOBS}/{name}").json
        status = value["status"]
        if status["phase"] in phases and status.get("metrics", {}).get("step", 0) >= step:
            return value
        assert status["phase"] in ("Pending", "Running", *phases), status
        assert time.monotonic() < deadline, status
        time.sleep(0.25)


def trainers(server: Server) -> list[int]:
    """Processes whose words or group say that they belong to a trainer of this server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"sandmill.server.trainer" in words and any(word.startswith(os.fsencode(server.folder)) for word in words):
                found.append(int(entry.name))
    return found


def below(pid: int) -> set[int]:
    """A process and all that it started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = {pid}, [pid]
    while waiting:
        more = children.get(waiting.pop(), [])
        found |= set(more)
        waiting += more
    return found


def gone(pids: set[int], within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_it_is_trained_and_says_what_it_came_to(trained: Server) -> None:
    assert post(trained, "whole", job_spec(maxCostUSD="5.00")).status == 201
    status = until(trained, "whole", "Succeeded")["status"]
    assert (status["metrics"]["step"], status["metrics"]["totalSteps"]) == (2, 2)
    assert status["summary"]["baseline"]["tasks"] + status["summary"]["baseline"]["errors"] == 16
    assert status["summary"]["comparison"]["reason"] in ("Comparable", "SmallestStep", "NonePassed")
    assert status["diagnostics"]["rewardSignal"] in ("ContrastObserved", "NoRewardContrast")
    assert 0 < float(status["cost"]["totalUSD"]) < 5
    assert (status["cost"]["final"], status["cost"]["limitUSD"]) == (True, "5.00")
    names = {one["name"]: one["sizeBytes"] for one in trained.ask("GET", f"{JOBS}/whole/outputs").json["items"]}
    assert {"adapter/adapter_model.safetensors", "report.html", "results.json"} <= set(names)
    results = trained.ask("GET", f"{JOBS}/whole/outputs/results.json")
    assert json.loads(results.body)["summary"] == status["summary"]
    assert len(results.headers["x-nodus-sha256"]) == 64
    assert trained.ask("GET", f"{JOBS}/whole/outputs/../manifest.json").status == 404
    pages = paged(trained, f"{JOBS}/whole/taskevents?eventType=Task&limit=10")
    assert [len(page) for page in pages] == [10, 10, 10, 10, 8]
    assert [event["phase"] for page in pages for event in page] == ["Baseline"] * 16 + ["Training"] * 16 + ["Evaluation"] * 16
    figures = trained.ask("GET", f"{JOBS}/whole/taskevents?eventType=Metrics").json["items"]
    assert [(event["step"], "reward" in event) for event in figures] == [(1, True), (2, True)]


def paged(server: Server, path: str) -> list[list[dict[str, Any]]]:
    pages: list[list[dict[str, Any]]] = []
    after = ""
    while True:
        page = server.ask("GET", path + after).json
        pages.append(page["items"])
        if "continue" not in page:
            return pages
        after = f"&after={page['continue']}"


def test_a_reward_that_breaks_is_an_error_and_no_number(trained: Server) -> None:
    assert post(trained, "breaks", job_spec("broken@1.0.0", parameters={**SMALL, "steps": 1})).status == 201
    status = until(trained, "breaks", "Succeeded")["status"]
    events = [event for page in paged(trained, f"{JOBS}/breaks/taskevents?eventType=Task&limit=500") for event in page]
    broken = [event for event in events if event["outcome"] == "Error"]
    assert broken
    assert all("reward" not in event and event["message"] == "grader" for event in broken)
    baseline = status["summary"]["baseline"]
    assert (baseline["tasks"] + baseline["errors"], baseline["errors"] > 0) == (16, True)
    assert status["summary"]["comparison"]["reason"] == "IncompleteEvents"
    assert "changePP" not in status["summary"]["comparison"]


def test_a_stopped_and_a_killed_one_go_on_where_they_were(trained: Server) -> None:
    parameters = {"steps": 6, **SMALL}
    assert post(trained, "long", job_spec(parameters=parameters)).status == 201
    until(trained, "long", "Running", step=1)
    trained.ask("PATCH", f"{JOBS}/long", {"spec": {"state": "Suspended"}}, MERGE)
    stopped = until(trained, "long", "Suspended")["status"]
    assert (trainers(trained), stopped["cost"]["final"]) == ([], False)
    trained.ask("PATCH", f"{JOBS}/long", {"spec": {"state": "Running"}}, MERGE)
    deadline = time.monotonic() + 60
    while not trainers(trained):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = below(trainers(trained)[0])
    trained.kill()
    assert gone(family)
    trained.start()
    status = until(trained, "long", "Succeeded")["status"]
    assert (status["attempt"], status["metrics"]["step"]) == (3, 6)
    figures = trained.ask("GET", f"{JOBS}/long/taskevents?eventType=Metrics&limit=500").json["items"]
    assert {event["step"] for event in figures} == {1, 2, 3, 4, 5, 6}
    assert {event["attempt"] for event in figures} <= {1, 2, 3}


def test_what_is_cancelled_or_deleted_leaves_no_process(trained: Server) -> None:
    parameters = {**SMALL, "steps": 1000}
    for name in ("first", "second", "third"):
        assert post(trained, name, job_spec(parameters=parameters)).status == 201
    uid = until(trained, "first", "Running", step=1)["metadata"]["uid"]
    trained.ask("PATCH", f"{JOBS}/second", {"spec": {"state": "Cancelled"}}, MERGE)
    assert trained.ask("GET", f"{JOBS}/second").json["status"]["phase"] == "Cancelled"
    family = below(trainers(trained)[0])
    assert len(family) > 1
    assert trained.ask("DELETE", f"{JOBS}/first").status == 200
    assert gone(family)
    assert not (trained.folder / "state" / "training" / uid).exists()
    until(trained, "third", "Running")
    trained.ask("PATCH", f"{JOBS}/third", {"spec": {"state": "Suspended"}}, MERGE)
    assert until(trained, "third", "Suspended")["status"]["reason"] == "Requested"  # though it had nothing to save
    trained.ask("PATCH", f"{JOBS}/third", {"spec": {"state": "Running"}}, MERGE)
    until(trained, "third", "Running")
    trained.ask("PATCH", f"{JOBS}/third", {"spec": {"state": "Cancelled"}}, MERGE)
    until(trained, "third", "Cancelled")
    assert trainers(trained) == []
    again = trained.ask("PATCH", f"{JOBS}/third", {"spec": {"state": "Running"}}, MERGE)
    assert (again.status, again.json["reason"]) == (409, "Conflict")


@pytest.mark.parametrize(
    ("change", "reason", "causes"),
    [
        ({"runtime": "nodus/grpo-lra"}, "Invalid", {"spec.runtime": "FieldValueNotSupported"}),
        ({"mode": "Evaluate"}, "Invalid", {"spec.mode": "FieldValueInvalid"}),
        ({"model": {"uri": "hf://sandmill/tiny-txt"}}, "Invalid", {"spec.model.uri": "FieldValueNotFound"}),
        ({"model": {"uri": "/no/such/model"}}, "Invalid", {"spec.model.uri": "FieldValueNotFound"}),
        ({"model": {"volume": {"name": "m"}}}, "Invalid", {"spec.model.uri": "FieldValueRequired", "spec.model.volume": "Unsupported"}),
        ({"environment": {"name": "wrds@1.0.0"}}, "Invalid", {"spec.environment.name": "FieldValueNotFound"}),
        ({"environment": {"name": "words@1.0.1"}}, "Invalid", {"spec.environment.name": "FieldValueNotFound"}),
        ({"environment": {"name": "words@1.0.0", "heldOutTasks": 15}}, "Invalid", {"spec.environment.heldOutTasks": "FieldValueInvalid"}),
        ({"environment": {"name": "words@1.0.0", "trainTasks": 21}}, "Invalid", {"spec.environment.trainTasks": "FieldValueInvalid"}),
        ({"parameters": {"batchSize": 5}}, "Invalid", {"spec.parameters.batchSize": "FieldValueInvalid"}),
        ({"parameters": {"learningRat": 1}}, "Invalid", {"spec.parameters.learningRat": "FieldValueNotSupported"}),
        ({"parameters": {"learningRate": 0}}, "Invalid", {"spec.parameters.learningRate": "FieldValueInvalid"}),
        ({"parameters": {"taskFilter": {"a": "b"}}}, "Unsupported", {"spec.parameters.taskFilter": "Unsupported"}),
        ({"evaluation": {"minComparisonTasks": 15}}, "Invalid", {"spec.evaluation.minComparisonTasks": "FieldValueInvalid"}),
        ({"resources": {"gpu": {"type": ["H100"]}}}, "Unsupported", {"spec.resources": "Unsupported"}),
        ({"tracking": {"wandb": {}}, "teacher": {}}, "Unsupported", {"spec.tracking": "Unsupported", "spec.teacher": "Unsupported"}),
    ],
    ids=lambda part: None if isinstance(part, dict) else part,
)
def test_every_field_is_checked(trained: Server, change: dict[str, Any], reason: str, causes: dict[str, str]) -> None:
    answer = post(trained, "wrong", job_spec(**change))
    assert (answer.status, answer.json["reason"], answer.causes) == (422, reason, causes)
    assert trained.ask("GET", f"{JOBS}/wrong").status == 404


def test_what_is_near_is_named(trained: Server) -> None:
    said = [post(trained, "x", job_spec(name)).json["message"] for name in ("wrds@1.0.0", "words@2.0.0")]
    assert ["did you mean 'words@1.0.0'?" in said[0], "write words@1.0.0" in said[1]] == [True, True]


def test_a_cap_needs_a_price(clean: Server) -> None:
    ready(clean, "words", WORDS)
    answer = post(clean, "capped", job_spec(maxCostUSD="1.00"))
    assert (answer.causes, "add hours.machine" in answer.json["message"]) == ({"spec.maxCostUSD": "FieldValueInvalid"}, True)


def test_a_preview_says_what_would_run_and_binds_it(trained: Server) -> None:
    preview = post(trained, "seen", job_spec(maxCostUSD="2.00", state="Suspended"), "?dryRun=All")
    value = preview.json
    assert value["spec"]["environment"] == {"name": "words@1.0.0", "seed": 0, "trainTasks": 20, "heldOutTasks": 16}
    assert value["status"]["estimate"]["rateUSDPerHour"] == "1.00"
    assert value["status"]["estimate"]["blockingReasons"] == []
    tag = {key.lower(): word for key, word in preview.headers.items()}["etag"]
    other = post(trained, "seen", job_spec(), headers={"If-Match": tag})
    assert (other.status, other.json["reason"]) == (412, "PreconditionFailed")
    assert post(trained, "seen", job_spec(maxCostUSD="2.00", state="Suspended"), headers={"If-Match": tag}).status == 201
    assert post(trained, "seen", job_spec(maxCostUSD="2.00")).status == 200
    until(trained, "seen", "Suspended")
    trained.ask("DELETE", f"{JOBS}/seen")


def test_an_environment_that_is_not_ready_blocks_it(clean: Server) -> None:
    create(clean, "sums", spec_of(clean, "import nowhere\n" + SUMS))
    clean.until("environments/sums", phase="Failed")
    reasons = post(clean, "early", job_spec("sums@1.0.0"), "?dryRun=All").json["status"]["estimate"]["blockingReasons"]
    assert [(one["code"], "No module named 'nowhere'" in one["message"]) for one in reasons] == [("EnvironmentNotReady", True)]
    assert post(clean, "early", job_spec("sums@1.0.0")).causes == {"spec.environment.name": "EnvironmentNotReady"}
