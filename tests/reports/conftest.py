from __future__ import annotations

import pytest
from synthetic_run import SyntheticRun


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A finished run folder with hostile text, read only."""
    return SyntheticRun(tmp_path_factory.mktemp("runs") / "demo").write()


@pytest.fixture
def unfinished_run(tmp_path):
    """Seven of 40 steps, no price, no evaluation after training."""
    return SyntheticRun(tmp_path / "part", steps=7, finished=False, priced=False).write()
