"""What `usable_backends` says of each, servers on loopback included."""

from __future__ import annotations

import pytest
from cluster import Cluster
from e2b_fleet import Fleet

from sandmill.sandboxes import usable_backends


def test_those_that_answer_are_usable(fleet: Fleet, cluster: Cluster) -> None:
    found = usable_backends()
    assert found["e2b"].ok
    assert found["kubernetes"].ok
    assert "namespace default" in found["kubernetes"].says
    assert not found["server"].ok


def test_an_address_where_nobody_answers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_API_URL", "http://127.0.0.1:9")
    assert usable_backends()["server"].fix
    monkeypatch.setenv("SANDMILL_API_URL", "no\x1b[31m")
    monkeypatch.setenv("SANDMILL_API_KEY", "k")
    assert "\x1b" not in usable_backends()["server"].says
