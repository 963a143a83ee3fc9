"""For tests of task sets that are files: the machine's image store keeps nothing of them."""

from __future__ import annotations

import pytest

from sandmill.sandboxes.images import store


@pytest.fixture(autouse=True, scope="module")
def _clean_store():
    before = {one.digest for one in store().list()}
    yield
    for one in store().list():
        if one.digest not in before and not one.in_use:
            store().remove(one.digest)
