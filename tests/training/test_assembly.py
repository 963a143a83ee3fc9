"""The parts of a run: what making them ready says, and refuses."""

import asyncio

from sandmill.config.manifest import EnvironmentSection, ModelSection, Spec
from sandmill.environments.packages.install import remove
from sandmill.training.assembly import resolve_environment

MODULE = """
SPLITS = ("train", "heldout")

def tasks(split):
    return [{"prompt": f"{split} {n}", "answer": "7"} for n in range(2)]

def reward(completion, answer):
    return completion == answer
"""


def test_what_is_installed_is_told_while_it_happens(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    section = EnvironmentSection(name=f"python/{tmp_path}/own.py", train_tasks=1, held_out_tasks=1)
    said = []
    environment = resolve_environment(Spec(model=ModelSection(uri="sandmill/tiny-text"), environment=section), said.append)
    asyncio.run(environment.close())
    remove(environment.installed.key)
    assert said[0] == "loading python/own"
