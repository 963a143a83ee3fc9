"""What cannot be given is refused before anything runs."""

import os

import pytest

from sandmill.config.manifest import GradingSection, JudgeSection, ToolsSection
from sandmill.environments.access.access import NOTHING, access_of
from sandmill.errors import ConfigError

ENDPOINT = JudgeSection(name="j", url="http://127.0.0.1:9/v1", key="SANDMILL_TEST_NO_SUCH_KEY")


def refused(section=ENDPOINT):
    with pytest.raises(ConfigError) as caught:
        access_of(GradingSection(judge=(section,)), ToolsSection(), None)
    return caught.value


def test_nothing_is_the_default():
    assert access_of(GradingSection(), ToolsSection(), None) == NOTHING
    assert NOTHING.environment == {}


def test_a_key_that_is_not_there_is_named_by_its_variable(monkeypatch):
    assert "the environment variable SANDMILL_TEST_NO_SUCH_KEY is not set" in str(refused())
    assert refused().field == "spec.grading.judge[0].key"
    monkeypatch.setenv("SANDMILL_TEST_NO_SUCH_KEY", "sk-\x1b[2J")
    assert "characters that no key has" in str(refused())
    assert "sk-" not in str(refused())


def test_graders_that_cannot_be_told_apart_are_given_no_judge(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run as root" in str(refused())
    assert access_of(GradingSection(), ToolsSection(), None) == NOTHING
