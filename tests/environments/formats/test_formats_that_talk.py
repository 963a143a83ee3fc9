"""Formats whose environments take part in the dialogue: what a reference and its options come to, before anything is installed."""

import sys

import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats import FORMATS, plan
from sandmill.errors import ConfigError, UnknownEnvironment


def planned(reference, **options):
    return plan(reference, EnvironmentSection(name=reference, seed=5, options=options))


@pytest.mark.parametrize("reference", ["textarena/TowerOfHanoi-v0", "nemo-gym/calendar", "verifiers-v1/some-package"])
def test_what_comes_from_an_index_needs_a_version(reference):
    with pytest.raises(UnknownEnvironment, match=f"write {reference}@"):
        planned(reference)


def test_options_that_are_not_the_formats_own_reach_the_package():
    assert planned("textarena/TowerOfHanoi-v0@0.7.4", num_disks=4, unfinished=0.5).load["arguments"] == {"num_disks": 4}
    assert planned("nemo-gym/calendar@0.7.0", some_field="x").load["arguments"] == {"some_field": "x"}
    assert planned("verifiers-v1/some-package@1.0", num_tasks=3).load["arguments"] == {"num_tasks": 3}
    assert planned("openenv/ws://127.0.0.1:8000", level=2, sessions=3).load["arguments"] == {"level": 2}


def test_held_out_games_have_seeds_that_no_training_game_reaches():
    for reference in ("textarena/TowerOfHanoi-v0@0.7.4", "openenv/ws://127.0.0.1:8000"):
        seeds = planned(reference).load["seeds"]
        assert 0 <= seeds["train"] < seeds["train"] + 1_000_000 < seeds["heldout"] < 2**31


def test_files_of_rows_are_part_of_what_is_installed(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    made = planned("nemo-gym/calendar@0.7.0", data=str(rows))
    assert [copied.source for copied in made.package.files] == [str(rows)]
    assert made.package.bare == ("nemo-gym==0.7.0",)
    with pytest.raises(ConfigError, match=r"options\.heldOut"):
        planned("nemo-gym/calendar@0.7.0", heldOut=str(tmp_path / "none.jsonl"))


def test_an_option_of_the_wrong_kind_is_named():
    for reference, options in (
        ("textarena/x@1", {"unfinished": "much"}),
        ("openenv/ws://h:1", {"act": "shout"}),
        ("nemo-gym/x@1", {"data": 3}),
    ):
        with pytest.raises(ConfigError, match=rf"options\.{next(iter(options))}"):
            planned(reference, **options)


def test_a_folder_that_is_none_is_named():
    with pytest.raises(UnknownEnvironment, match="there is no folder some/where"):
        planned("verifiers-v1/some/where")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_adapter_imports_this_project(name):
    folder = sys.modules["sandmill.environments.formats"].__path__[0]
    module = FORMATS[name].rpartition(".")[2]
    with open(f"{folder}/adapters/{module}.py", encoding="utf-8") as file:
        assert "sandmill" not in file.read().replace("sandmill_adapter", "")
