"""Packages are installed from a folder of wheels and nowhere else."""

import pytest

from sandmill.environments.packages.install import records, remove
from sandmill.sandboxes.backends.native import state


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The only place that pip looks at: an empty folder, to put wheels into."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def installs():
    """The folder of what is installed; what a test installs is removed after it."""
    before = set(records())
    yield state.state_root() / "envs"
    for key in set(records()) - before:
        remove(key)
