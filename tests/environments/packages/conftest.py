"""Packages are installed from a folder of wheels and nowhere else."""

import pytest
from installed import only_index, removed_after

from sandmill.sandboxes.backends.native import state


@pytest.fixture
def index(tmp_path):
    """The only place that pip looks at: an empty folder, to put wheels into."""
    folder = tmp_path / "index"
    folder.mkdir()
    with only_index(folder):
        yield folder


@pytest.fixture
def installs():
    """The folder of what is installed; what a test installs is removed after it."""
    with removed_after():
        yield state.state_root() / "envs"
