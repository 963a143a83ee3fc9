"""What more than one file here needs, made once."""

from __future__ import annotations

import os
from pathlib import Path

import astropy_image
import pytest


@pytest.fixture(scope="session")
def astropy_rows(tmp_path_factory):
    """A file of SWE-bench Verified rows, their image in the store. Downloads stay in SANDMILL_PEERS, or in a folder of this run."""
    named = os.environ.get("SANDMILL_PEERS")
    place = Path(named) / "swebench" if named else tmp_path_factory.mktemp("swebench")
    place.mkdir(parents=True, exist_ok=True)
    prefix = astropy_image.python_39()
    assert prefix is not None, "astropy 5.0.1 is published for Python 3.9 at most: install one (pyenv install 3.9)"
    astropy_image.install(place, prefix)
    return astropy_image.rows(place, *astropy_image.build(place, prefix))
