"""Rows of SWE-bench: both releases' fields, and that what is wrong is named with file, row and field."""

import json

import pytest
from harbor_attempts import on_loop
from swebench_rows import BROKEN, OTHER, RELEASE, index, row, write_rows

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.formats.swebench import release_for
from sandmill.environments.formats.swebench.environment import image_name
from sandmill.environments.formats.swebench.rows import read_rows
from sandmill.environments.packages.install import records
from sandmill.errors import ConfigError, EnvironmentFailed


def test_lists_may_be_text_and_unknown_columns_are_left(tmp_path):
    (found,) = read_rows(write_rows(tmp_path / "rows.jsonl", row(hints_text="x", difficulty=3)))
    assert found.fail_to_pass == ("test_adding.py::test_add",)
    assert found.pass_to_pass == ("test_adding.py::test_zero",)


def test_rows_of_older_releases_lack_the_evaluation(tmp_path):
    older = {key: value for key, value in row().items() if key not in ("image", "log_parser", "eval_type", "eval_script")}
    (tmp_path / "rows.json").write_text(json.dumps([older]))
    (found,) = read_rows(tmp_path / "rows.json")
    assert (found.image, found.eval_script) == ("", "")
    assert image_name(found, "") == "swebench/sweb.eval.x86_64.own_1776_adding-1:latest"
    assert image_name(found, "own/{instance_id}:2") == "own/own__adding-1:2"


def test_rows_may_be_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([row(), row(instance_id="other", image=None)]), tmp_path / "rows.parquet")
    assert [(one.instance_id, one.image) for one in read_rows(tmp_path / "rows.parquet")] == [
        ("own__adding-1", "tests/adding"),
        ("other", ""),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"instance_id": "../up"}, "instance_id: row 1: '../up' is no plain name"),
        ({"instance_id": "a" * 300}, "is no plain name"),
        ({"instance_id": "first"}, "instance_id: row 1: 'first' is row 0 too"),
        ({"patch": None}, "patch: row 1 has no text there"),
        ({"problem_statement": ""}, "problem_statement: row 1 has no text there"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: row 1 names no test that has to pass"),
        ({"FAIL_TO_PASS": "test_a"}, "FAIL_TO_PASS: row 1: it is text, but no JSON list"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS: row 1 has no list of test names there"),
        ({"eval_type": "pass_or_fail"}, "eval_type: row 1: there is no 'pass_or_fail'; the nearest is pass_and_fail"),
    ],
)
def test_a_broken_row_is_named(tmp_path, changes, said):
    path = write_rows(tmp_path / "rows.jsonl", row(instance_id="first"), row(**changes))
    with pytest.raises(ConfigError) as caught:
        read_rows(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_column_with_another_name_is_pointed_at(tmp_path):
    renamed = row()
    renamed["problem_statment"] = renamed.pop("problem_statement")
    with pytest.raises(ConfigError, match="the row has 'problem_statment'"):
        read_rows(write_rows(tmp_path / "rows.jsonl", renamed))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.jsonl", "\n{", "it is no jsonl: line 2, column 2: Expecting"),
        ("rows.jsonl", "", "it has no row"),
        ("rows.jsonl", "3\n", "row 0 is no object"),
        ("rows.csv", "a,b\n", "rows are read from .jsonl, .json, .parquet"),
        ("rows.parquet", "x", "it is no parquet"),
    ],
)
def test_a_file_that_holds_no_rows_is_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_rows(tmp_path / name)
    assert said in str(caught.value)


@pytest.fixture
def get(tmp_path):
    """The environment of a row, from `swebench/FILE@RELEASE`."""
    path = write_rows(tmp_path / "rows.jsonl", row())
    made = []

    def environment(release=RELEASE, **options):
        made.append(registry.get(f"swebench/{path}@{release}", EnvironmentSection(name="x", options=options)))
        return made[-1]

    with index(tmp_path / "index"):
        yield environment
        for one in made:
            on_loop(one.close())


def test_rows_become_tasks_without_their_answers(get):
    found = get()
    assert [(task.id, task.prompt) for task in found.tasks] == [("own__adding-1", "add subtracts")]
    assert not any("+    return a + b" in str(task) or "test_add" in str(task) for task in found.tasks)


def test_the_package_is_installed_as_any_other_and_listed_by_what_uses_it(get):
    before = set(records())
    get()
    (found,) = [one for key, one in records().items() if key not in before]
    assert [(one.name, one.version) for one in found.wheels] == [("swebench", RELEASE), ("unidiff", "1.0.1")]
    assert [one.partition("/")[0] for one in found.references] == ["swebench"]


def test_another_release_is_another_grading(get):
    first, again, other = (get(release) for release in (RELEASE, RELEASE, OTHER))
    assert first.digest == again.digest != other.digest


def test_a_release_that_cannot_be_loaded_says_why(get):
    with pytest.raises(EnvironmentFailed, match=r"swebench 99\.3 could not be loaded: .*no_such_module"):
        get(BROKEN)


def test_rows_decide_the_release_that_nobody_names(tmp_path):
    newer, older = read_rows(write_rows(tmp_path / "rows.jsonl", row(), row(instance_id="b", eval_script="", log_parser="")))
    assert (release_for([newer]), release_for([newer, older])) == ("5.0.2", "4.1.0")


@pytest.mark.parametrize(
    ("release", "options", "error", "said"),
    [
        ("99.9", {}, EnvironmentFailed, "there is no swebench==99.9 that fits this Python"),
        (RELEASE, {"package": "folder"}, ConfigError, "package"),
        (RELEASE, {"at_timeout": "never"}, ConfigError, "it is unsolved or failure"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_runs(get, release, options, error, said):
    with pytest.raises(error, match=said):
        get(release, **options)
