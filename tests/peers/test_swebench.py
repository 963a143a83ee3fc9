"""SWE-bench with the published packages and rows: base fails, gold resolves, cheats gain nothing, inside sandboxes without a network."""

from __future__ import annotations

import asyncio

import astropy_image
import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.attempts import Kind
from sandmill.environments.check import Status, all_tasks, check
from sandmill.environments.formats.swebench.harness import DESCRIBING, READING, Evaluation, Harness
from sandmill.environments.formats.swebench.rows import read_rows
from sandmill.sandboxes import loop


@pytest.fixture(scope="module")
def environment(astropy_rows):
    made = registry.get(f"swebench/{astropy_rows}", EnvironmentSection(name="x", options={"timeout_s": 300}))
    yield made
    on_loop(made.close())


def on_loop(work):
    return asyncio.run_coroutine_threadsafe(work, loop()).result(900)


def checked(environment, instance, *, cheats):
    return on_loop(check(environment, all_tasks(environment, [instance]), cheats=cheats))[instance]


@pytest.mark.parametrize("instance", astropy_image.INSTANCES)
def test_gold_resolves_and_base_does_not(environment, instance):
    found = checked(environment, instance, cheats=False)
    assert {trial.kind: (trial.passed, trial.reward) for trial in found.trials} == {Kind.SOLUTION: (True, 1.0), Kind.NOTHING: (False, 0.0)}
    assert found.status is Status.SOUND


def test_no_cheat_resolves_anything(environment):
    found = checked(environment, "astropy__astropy-13453", cheats=True)
    assert found.status is Status.SOUND, found.reason
    assert len(found.trials) > 8


def test_parsers_of_the_next_release_read_the_same_log(astropy_rows):
    row = next(row for row in read_rows(astropy_rows) if row.instance_id == astropy_image.INSTANCES[0])
    log = b">>>>> Start Test Output\nPASSED a.py::b[c]\nFAILED a.py::d - x\n>>>>> End Test Output\n"

    async def read(release, parser):
        harness = await Harness.open(release, "swebench/peers", print)
        try:
            return await harness.parse(row, Evaluation(eval_script="", log_parser=parser, eval_type="pass_and_fail"), log)
        finally:
            await harness.close()

    found = [on_loop(read(READING, "parse_log_pytest_v2")), on_loop(read(DESCRIBING, ""))]
    assert found == [{"a.py::b[c]": "PASSED", "a.py::d": "FAILED"}] * 2
