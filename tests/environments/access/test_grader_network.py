"""A grader's network is what the manifest names, by host, and nothing without it."""

import sys
from pathlib import Path

import pytest

from sandmill.config.manifest import EgressPolicy, EgressSection, GradingSection, NetworkSection, ToolsSection
from sandmill.environments.access.access import access_of
from sandmill.environments.task import Graded
from sandmill.sandboxes.egress import handover

sys.path.append(str(Path(__file__).parents[2] / "sandboxes"))
from internet import EVIL, GOOD, http_server, internet

FETCH = """
try:
    said = post("/x", None, "GET", base="http://" + completion)
except Exception as error:
    said = str(error)
return {"reward": 1.0, "parts": {said[:80]: 1.0}}
"""


@pytest.fixture
def world(monkeypatch):
    """An internet of two hosts where this machine's is otherwise."""
    with internet() as world:
        world.names = {"facts.example.org": [[GOOD]], "evil.example.org": [[EVIL]]}
        http_server(world, GOOD, "facts")
        monkeypatch.setattr(handover, "_host_network", world)
        yield world


def access(*hosts):
    egress = EgressSection(policy=EgressPolicy.ALLOW_LIST, allow=hosts) if hosts else EgressSection()
    return access_of(GradingSection(network=NetworkSection(egress=egress)), ToolsSection(), None)


def said(found):
    assert all(isinstance(verdict, Graded) for verdict, _ in found)
    return [next(iter(verdict.parts)) for verdict, _ in found]


def test_a_grader_reaches_the_hosts_that_are_named_and_no_other(world, graded):
    evil = http_server(world, EVIL, "evil")
    found = said(graded(FETCH, ["facts.example.org", "evil.example.org"], access("facts.example.org")))
    assert found[0] == "facts got facts.example.org /x"
    assert "not known" in found[1]
    assert evil.heard == []


def test_without_a_word_it_reaches_nothing(world, graded):
    found = said(graded(FETCH, ["facts.example.org", "127.0.0.1:8399"], access()))
    assert "name resolution" in found[0]
    assert "refused" in found[1]
    assert world.connections == []
