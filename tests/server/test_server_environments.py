"""Environment objects: measured in a sandbox, or Failed with what to change; a version never means something else."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from bundles import SUMS, bundle, create, odd, ready, spec_of
from server_process import Server, serving

MERGE = {"Content-Type": "application/merge-patch+json"}
TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
NOWHERE = {"blob": "sha256:" + "0" * 64, "module": "a"}
EXAMPLE = {"name": "a", "mode": "Train", "runtime": "r", "changePP": 101}
SLOW = "import time\ntime.sleep(3)\n" + SUMS


def rewarding(statement: str) -> str:
    """A module whose reward does this first."""
    return SUMS.replace("    return 1.0", f"    {statement}\n    return 1.0")


def test_it_is_loaded_and_its_tasks_are_counted(clean: Server) -> None:
    value = ready(clean, "sums")
    assert value["status"]["splits"] == {"train": 24, "test": 16}
    assert value["status"]["digest"].startswith("sha256:")
    assert value["spec"]["sandbox"] == {"cpu": "1", "memory": "1Gi", "timeout": "60s"}
    rows = clean.ask("GET", "environments", headers=TABLE).json["rows"]
    assert rows[0]["cells"][:5] == ["sums", "1.0.0", "Ready", 24, 16]


def test_equal_bundles_have_equal_digests(clean: Server) -> None:
    digests = {ready(clean, name)["status"]["digest"] for name in ("one", "two")}
    other = ready(clean, "three", SUMS.replace("n + 1)", "n + 2)"))["status"]["digest"]
    assert (len(digests), other in digests) == (1, False)


def test_packages_below_site_are_found(clean: Server) -> None:
    source = "import helper\n" + SUMS.replace("str(n + 1)", "helper.say(n)")
    files = {"sums.py": source, "site/helper.py": "def say(n): return str(n + 1)\n"}
    assert ready(clean, "sums", bundle(files))["status"]["splits"]["train"] == 24


@pytest.mark.parametrize(
    ("name", "data", "reason", "said"),
    [
        ("up", bundle({"../sums.py": SUMS}), "BundleInvalid", "'../sums.py', which lies outside it"),
        ("root", bundle({"/etc/sums.py": SUMS}), "BundleInvalid", "'/etc/sums.py', which lies outside it"),
        ("link", bundle({"sums.py": odd("sums.py", type=tarfile.SYMTYPE, linkname="/etc/passwd")}), "BundleInvalid", "neither a file nor"),
        ("hard", bundle({"sums.py": odd("sums.py", type=tarfile.LNKTYPE, linkname="x")}), "BundleInvalid", "neither a file nor a folder"),
        ("pipe", bundle({"sums.py": odd("sums.py", type=tarfile.FIFOTYPE)}), "BundleInvalid", "neither a file nor a folder"),
        ("bomb", bundle({"zeros": odd("zeros", size=129 << 20), "sums.py": SUMS}), "BundleInvalid", "unpacks to more than 134217728 bytes"),
        ("text", b"no archive", "BundleInvalid", "cannot be read as a tar.gz"),
        ("cut", bundle({"sums.py": SUMS})[:-40], "BundleInvalid", "cannot be read as a tar.gz"),
        ("none", bundle({"other.py": SUMS, "sums/a.py": ""}), "BundleInvalid", "no module 'sums' at its top; it has other.py"),
    ],
)
def test_a_bundle_that_is_none_says_what_is_wrong(clean: Server, name: str, data: bytes, reason: str, said: str) -> None:
    failed(clean, name, data, reason, said)


@pytest.mark.parametrize(
    ("name", "source", "reason", "said"),
    [
        ("import", "import nowhere", "LoadFailed", "No module named 'nowhere'"),
        ("exit", "import os\nos._exit(4)", "LoadFailed", "it ended with exit code 4"),
        ("functions", "def tasks(split): return []", "LoadFailed", "sums.py has no function reward()"),
        ("empty", SUMS.replace('return [{"prompt"', 'return [] and [{"prompt"'), "TasksInvalid", "has no tasks in any split"),
        ("field", SUMS.replace('"answer":', '"anwser":'), "LoadFailed", "field 'answer' is missing"),
        ("blank", SUMS.replace('f"{n} + 1 = ?"', '" "'), "TasksInvalid", "row 0: field 'prompt' is empty"),
        ("leak", SUMS.replace('"test": 100', '"test": 10'), "TasksInvalid", "the bundle leaks: identity"),
        (
            "raises",
            rewarding("raise KeyError('x')"),
            "RewardFailed",
            "the answer of its first task: KeyError",
        ),
        ("nan", rewarding("return float('nan')"), "RewardFailed", "nan"),
        ("words", rewarding("return 'good'"), "RewardFailed", "the answer of its first task"),
        ("silence", rewarding("completion[0]"), "RewardFailed", "an empty reply: IndexError"),
    ],
)
def test_a_module_that_cannot_be_used_says_what_to_change(clean: Server, name: str, source: str, reason: str, said: str) -> None:
    failed(clean, name, bundle({"sums.py": source}), reason, said)


def failed(server: Server, name: str, data: bytes, reason: str, said: str) -> None:
    answer = create(server, name, spec_of(server, data))
    assert answer.status == 201, answer.body
    status = server.until(f"environments/{name}", phase="Failed")["status"]
    assert (status["reason"], said in status["message"]) == (reason, True), status
    assert str(server.folder) not in status["message"]


def test_declared_sizes_must_be_the_real_ones(clean: Server) -> None:
    create(clean, "sums", spec_of(clean, splits={"train": {"size": 24}, "test": {"size": 17}}))
    status = clean.until("environments/sums", phase="Failed")["status"]
    assert (status["reason"], "spec.splits.test.size says 17" in status["message"]) == ("SplitsDiffer", True)


@pytest.mark.parametrize(
    ("change", "reason", "causes"),
    [
        ({"version": "1.0"}, "Invalid", {"spec.version": "FieldValueInvalid"}),
        ({"version": None}, "Invalid", {"spec.version": "FieldValueRequired"}),
        ({"modes": ["train"]}, "Invalid", {"spec.modes[0]": "FieldValueNotSupported"}),
        ({"rewardTyp": "Binary"}, "Invalid", {"spec.rewardTyp": "FieldValueNotSupported"}),
        ({"sandbox": {"timeout": "11m"}}, "Invalid", {"spec.sandbox.timeout": "FieldValueInvalid"}),
        ({"sandbox": {"memory": "1Mi"}}, "Invalid", {"spec.sandbox.memory": "FieldValueInvalid"}),
        ({"splits": {"train": {"size": 1}}}, "Invalid", {"spec.splits.test": "FieldValueRequired"}),
        ({"sampleTask": "x" * 5000}, "Invalid", {"spec.sampleTask": "FieldValueTooLong"}),
        ({"examples": [EXAMPLE]}, "Invalid", {"spec.examples[0].changePP": "FieldValueInvalid"}),
        ({"package": {}}, "Invalid", {"spec.package.source": "FieldValueRequired"}),
        ({"package": {"source": NOWHERE}}, "Invalid", {"spec.package.source.blob": "FieldValueNotFound"}),
        ({"package": {"image": "example.org/a@sha256:1"}}, "Unsupported", {"spec.package.image": "Unsupported"}),
        ({"package": {"pip": {"name": "x", "version": "1"}}}, "Unsupported", {"spec.package.pip": "Unsupported"}),
        ({"graders": [{"name": "a", "kind": "ExactMatch"}]}, "Unsupported", {"spec.graders[0].kind": "Unsupported"}),
        ({"sandbox": {"image": "nodus/agent-tools"}}, "Unsupported", {"spec.sandbox.image": "Unsupported"}),
    ],
    ids=lambda part: None if isinstance(part, dict) else part,
)  # fmt: skip
def test_every_field_is_checked(clean: Server, change: dict[str, Any], reason: str, causes: dict[str, str]) -> None:
    answer = create(clean, "sums", spec_of(clean) | change)
    assert (answer.status, answer.json["reason"], answer.causes) == (422, reason, causes)
    assert clean.ask("GET", "environments").json["items"] == []


def test_a_factory_is_refused_with_what_is_taken(clean: Server) -> None:
    spec = spec_of(clean)
    spec["package"]["source"]["module"] = "sums:make"
    answer = create(clean, "sums", spec)
    assert (answer.json["reason"], answer.causes) == ("Unsupported", {"spec.package.source.module": "Unsupported"})
    assert "write sums and put both there" in answer.json["message"]


def test_a_blob_of_another_project_is_not_there(clean: Server) -> None:
    body = {"metadata": {"name": "sums"}, "spec": spec_of(clean)}
    answer = clean.ask("POST", "/apis/nodus.dev/v1/namespaces/other/environments", body)
    assert answer.causes == {"spec.package.source.blob": "FieldValueNotFound"}


def test_a_version_never_changes(clean: Server) -> None:
    spec = ready(clean, "sums")["spec"]
    other = spec_of(clean, SUMS.replace("n + 1)", "n + 2)"))["package"]
    assert create(clean, "sums", spec).status == 200
    again = create(clean, "sums", spec | {"package": other})
    assert (again.status, again.json["reason"]) == (409, "AlreadyExists")
    for version in ("1.0.0", "0.9.9", "1.0.0-rc.1"):
        changed = clean.ask("PATCH", "environments/sums", {"spec": {"package": other, "version": version}}, MERGE)
        assert (changed.status, changed.json["reason"]) == (409, "FieldImmutable")
        assert "write a higher spec.version" in changed.json["details"]["causes"][0]["message"]


def test_a_higher_version_is_measured_anew(clean: Server) -> None:
    before = ready(clean, "sums")["status"]["digest"]
    other = spec_of(clean, SUMS.replace('"train": 24', '"train": 25'))["package"]
    answer = clean.ask("PATCH", "environments/sums", {"spec": {"package": other, "version": "1.1.0-rc.1"}}, MERGE)
    assert (answer.status, answer.json["status"]) == (200, {"phase": "Pending"})
    after = clean.until("environments/sums", phase="Ready")["status"]
    assert (after["splits"]["train"], after["digest"] == before, after["observedGeneration"]) == (25, False, 2)


def test_what_only_describes_may_change(clean: Server) -> None:
    digest = ready(clean, "sums")["status"]["digest"]
    answer = clean.ask("PATCH", "environments/sums", {"spec": {"summary": "Sums.", "readiness": "Stable"}}, MERGE)
    assert (answer.status, answer.json["spec"]["summary"], answer.json["status"]["digest"]) == (200, "Sums.", digest)


def test_a_dry_run_leaves_nothing(clean: Server) -> None:
    answer = clean.ask("POST", "environments?dryRun=All", {"metadata": {"name": "sums"}, "spec": spec_of(clean)})
    assert (answer.status, "ETag" in {key.title().replace("Etag", "ETag") for key in answer.headers}) == (201, True)
    assert clean.ask("GET", "environments/sums").status == 404


def test_deleting_it_frees_what_it_held(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        ready(server, "one")
        ready(server, "two")
        assert server.ask("DELETE", "environments/one").status == 200
        assert len(list((tmp_path / "state" / "environments").iterdir())) == 1
        assert list((tmp_path / "sandboxes" / "envs").glob("*.json"))  # two has the same package
        assert server.ask("DELETE", "environments/two").status == 200
        assert not list((tmp_path / "state" / "environments").iterdir())
        assert not list((tmp_path / "sandboxes" / "envs").glob("*.json"))


def test_a_killed_server_goes_on_where_it_was_in_postgresql_too(tmp_path: Path, postgres: str) -> None:
    with serving(tmp_path, "--database", postgres) as server:
        assert create(server, "slow", spec_of(server, SLOW)).status == 201
        server.kill()
        server.start()
        assert server.until("environments/slow", phase="Ready")["status"]["splits"] == {"train": 24, "test": 16}
        assert server.ask("DELETE", "environments/slow").status == 200
