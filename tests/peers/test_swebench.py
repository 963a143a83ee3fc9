"""SWE-bench with the published packages and rows: base fails, gold resolves, cheats gain nothing, inside sandboxes without a network."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import astropy_image
import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.check import REFERENCE, UNTOUCHED, Status, all_tasks, check
from sandmill.environments.formats.swebench.rows import read_rows
from sandmill.environments.formats.swebench.worker import Evaluation, Worker
from sandmill.sandboxes import loop


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where downloads stay: SANDMILL_PEERS, or a folder of this run."""
    named = os.environ.get("SANDMILL_PEERS")
    place = Path(named) / "swebench" if named else tmp_path_factory.mktemp("swebench")
    place.mkdir(parents=True, exist_ok=True)
    prefix = astropy_image.python_39()
    assert prefix is not None, "astropy 5.0.1 is published for Python 3.9 at most: install one (pyenv install 3.9)"
    astropy_image.install(place, prefix)
    return place, prefix


@pytest.fixture(scope="module")
def environment(cache):
    place, _ = cache
    image, commit = astropy_image.build(*cache)
    rows = astropy_image.rows(place, image, commit)
    return registry.get(f"swebench/{rows}", EnvironmentSection(name="x", options={"package": str(place / "package"), "timeout_s": 300}))


def checked(environment, instance, *, cheats):
    work = check(environment, all_tasks(environment, [instance]), cheats=cheats)
    return asyncio.run_coroutine_threadsafe(work, loop()).result(900)[instance]


@pytest.mark.parametrize("instance", astropy_image.INSTANCES)
def test_gold_resolves_and_base_does_not(environment, instance):
    found = checked(environment, instance, cheats=False)
    assert {trial.what: (trial.passed, trial.reward) for trial in found.trials} == {REFERENCE: (True, 1.0), UNTOUCHED: (False, 0.0)}
    assert found.status is Status.SOUND


def test_no_cheat_resolves_anything(environment):
    found = checked(environment, "astropy__astropy-13453", cheats=True)
    assert found.status is Status.SOUND, found.reason
    assert len(found.trials) > 8


def test_parsers_of_the_next_release_read_the_same_log(cache):
    place, _ = cache
    newer = astropy_image.newer_package(place)
    row = next(row for row in read_rows(place / "rows.jsonl") if row.instance_id == astropy_image.INSTANCES[0])
    log = b">>>>> Start Test Output\nPASSED a.py::b[c]\nFAILED a.py::d - x\n>>>>> End Test Output\n"

    def read(folder, parser):
        evaluation = Evaluation(eval_script="", log_parser=parser, eval_type="pass_and_fail")
        return asyncio.run_coroutine_threadsafe(Worker(folder).parse(row, evaluation, log), loop()).result(120)

    assert read(newer, "parse_log_pytest_v2") == read(place / "package", "") == {"a.py::b[c]": "PASSED", "a.py::d": "FAILED"}
