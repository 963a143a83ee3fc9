"""Rows of SWE-bench: both releases' fields, and that what is wrong is named with file, row and field."""

import json

import pytest
from swebench_rows import package, row, write_rows

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.formats.swebench.environment import image_name
from sandmill.environments.formats.swebench.rows import read_rows
from sandmill.errors import ConfigError


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


def test_the_package_is_looked_for_before_anything_runs(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", row())
    with pytest.raises(ConfigError, match="the key 'package' is missing"):
        registry.get(f"swebench:{path}", EnvironmentSection(name="x"))
    with pytest.raises(ConfigError, match="pip install --target"):
        registry.get(f"swebench:{path}", EnvironmentSection(name="x", options={"package": str(tmp_path)}))
    found = registry.get(f"swebench:{path}", EnvironmentSection(name="x", options={"package": str(package(tmp_path / "package"))}))
    assert [(task.id, task.prompt) for task in found.tasks] == [("own__adding-1", "add subtracts")]
    assert not any("+    return a + b" in str(task) or "test_add" in str(task) for task in found.tasks)
