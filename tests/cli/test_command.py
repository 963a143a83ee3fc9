"""The command as people type it: help, version, wrong words, exit codes, and what it does not import."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from synthetic_run import SyntheticRun

ROOT = Path(__file__).parents[2]

GOOD = """\
spec:
  model: {uri: sandmill/tiny-shell}
  environment: {name: shell@1.0.0, trainTasks: 16, heldOutTasks: 16}
"""


def sentence(done, code):
    """The one sentence on stderr of a command that ended with `code`."""
    assert done.returncode == code, done.stderr.decode()
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert done.stdout == b""
    return lines[0]


def test_help_names_every_command(sandmill):
    said = sandmill("--help").stdout.decode()
    for name in ("train", "eval", "sandbox", "doctor", "report", "--version", "--debug"):
        assert name in said
    assert all(name in sandmill("sandbox", "--help").stdout.decode() for name in ("run", "shell", "ls", "stop"))


def test_version(sandmill):
    said = sandmill("--version").stdout.decode()
    try:
        assert said == f"sandmill {version('sandmill')}\n"
    except PackageNotFoundError:
        assert "not installed" in said


def test_the_entry_point_of_the_package_is_the_same_command(sandmill):
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["sandmill"].partition(":")
    code = f"from {module} import {function}; {function}()"
    done = sandmill.python("-c", code, "report", "nowhere")
    assert sentence(done, 6) == sentence(sandmill("report", "nowhere"), 6)


def test_no_command_shows_the_help(sandmill):
    done = sandmill()
    assert done.returncode == 2
    assert done.stderr == sandmill("--help").stdout
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "x.yaml"], "No such command 'trian'"),
        (["train"], "Missing argument 'FILE.yaml'"),
        (["train", "x.yaml", "--sett", "a=b"], "No such option: --sett"),
        (["eval", "x.yaml", "--samples", "0"], "--samples"),
        (["sandbox", "run"], "Missing argument"),
    ],
)
def test_words_that_make_no_sense_are_one_sentence_with_the_way_to_the_help(sandmill, words, said):
    told = sentence(sandmill(*words), 2)
    assert said in told
    assert "--help" in told


def test_a_manifest_that_does_not_exist_names_its_nearest_neighbour(sandmill):
    (sandmill.folder / "demo.yaml").write_text(GOOD)
    assert "did you mean 'demo.yaml'" in sentence(sandmill("train", "demo.yml"), 2)


def test_a_wrong_key_is_named_with_file_line_and_field(sandmill):
    (sandmill.folder / "demo.yaml").write_text(GOOD.replace("trainTasks", "trainTask"))
    told = sentence(sandmill("train", "demo.yaml"), 2)
    assert told == "error: demo.yaml:3: spec.environment.trainTask: unknown key 'trainTask'; did you mean 'trainTasks'?"


def test_a_wrong_override_names_the_option(sandmill):
    (sandmill.folder / "demo.yaml").write_text(GOOD)
    told = sentence(sandmill("train", "demo.yaml", "--set", "spec.parameters.step=3"), 2)
    assert "--set spec.parameters.step=3: spec.parameters.step: unknown key 'step'; did you mean 'steps'?" in told


def test_debug_shows_the_traceback_and_only_debug_does(sandmill):
    (sandmill.folder / "demo.yaml").write_text("spec: [")
    done = sandmill("--debug", "train", "demo.yaml")
    assert done.returncode == 2
    assert b"Traceback (most recent call last)" in done.stderr
    assert b"error: demo.yaml:1: is not valid YAML" in done.stderr
    assert sandmill("train", "demo.yaml", "--debug").stderr == done.stderr


def test_a_hostile_manifest_name_cannot_act_on_the_terminal(sandmill):
    name = "\x1b]0;pwned\x07\x1b[31m\u202e.yaml"
    told = sandmill("train", name)
    assert told.returncode == 2
    assert b"\x1b" not in told.stderr
    assert "\u202e" not in told.stderr.decode()


def test_a_name_that_is_no_utf8_is_shown_and_does_not_crash(sandmill):
    done = sandmill("train", b"\xff\xfe.yaml")
    assert "does not exist" in sentence(done, 2)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["report", "nowhere"], ["train", "nowhere.yaml"], ["sandbox", "ls"]])
def test_light_commands_do_not_import_torch(sandmill, words):
    code = f"""
import sys
from sandmill.cli.app import run
try:
    run({words!r})
except SystemExit:
    pass
heavy = sorted(name for name in ("torch", "transformers", "peft", "numpy") if name in sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = sandmill.python("-c", code)
    assert done.returncode == 0, done.stderr.decode()


def test_report_recomputes_page_and_summary_from_the_folder(sandmill):
    SyntheticRun(sandmill.folder / "runs" / "demo").write()
    done = sandmill("report", "runs/demo")
    assert done.returncode == 0, done.stderr.decode()
    assert "heldout  sampled" in done.stdout.decode()
    assert (sandmill.folder / "runs" / "demo" / "report.html").is_file()
    told = json.loads(sandmill("report", "runs/demo", "--json").stdout)
    assert told["steps_done"] == 40
    assert told["splits"][0]["change"] > 0.5


def test_report_of_an_unfinished_run_works_and_its_cost_is_unknown(sandmill):
    SyntheticRun(sandmill.folder / "part", steps=7, finished=False, priced=False).write()
    done = sandmill("report", "part")
    assert done.returncode == 0
    assert "steps   7 of 40" in done.stdout.decode()
    assert "cost    unknown" in done.stdout.decode()
    assert "$0.00" not in done.stdout.decode()


def test_report_of_what_is_no_run_is_one_sentence(sandmill):
    (sandmill.folder / "empty").mkdir()
    assert "is not a run folder" in sentence(sandmill("report", "empty"), 6)
    assert "is not a folder" in sentence(sandmill("report", "nowhere"), 6)
    SyntheticRun(sandmill.folder / "old", steps=1, finished=False).write()
    (sandmill.folder / "old" / "format").write_text("sandmill-run 0\n")
    assert "sandmill-run 0" in sentence(sandmill("report", "old"), 6)


def test_a_reader_that_goes_away_is_no_traceback(sandmill):
    SyntheticRun(sandmill.folder / "demo", steps=3).write()
    with sandmill.start("report", "demo") as started:
        started.stdout.close()
        assert started.stderr.read() == b""
        assert started.wait(60) == 141


def test_resume_without_a_run_says_so(sandmill):
    (sandmill.folder / "demo.yaml").write_text(GOOD)
    assert "there is no run of demo.yaml under runs/ to resume" in sentence(sandmill("train", "demo.yaml", "--resume"), 2)


@pytest.mark.parametrize(
    "words",
    [
        "env init made",
        "env rm python/never",
        "env prune",
        "image prune",
        "image rm nothing",
        "key rm nobody",
        "sandbox stop nothing",
        "key ls",
    ],
)
def test_every_command_that_tells_something_tells_it_as_json(sandmill, words):
    sandmill.env["SANDMILL_STATE"] = str(sandmill.folder / "state")
    done = sandmill(*words.split(), "--json")
    (line,) = done.stdout.decode().splitlines()
    told = json.loads(line)
    assert done.returncode == (told["exit_code"] if isinstance(told, dict) and "exit_code" in told else 0)


def test_an_interrupt_while_modules_are_imported_is_no_traceback(sandmill):
    """As soon as there is anything of ours, Ctrl-C ends the process as it ends any other program."""
    code = "import os, signal\nfrom sandmill.cli import main\nimport sys\nclass Slow:\n    def find_spec(self, name, *rest):\n"
    code += (
        "        if name == 'sandmill.cli.app':\n            os.kill(os.getpid(), signal.SIGINT)\nsys.meta_path.insert(0, Slow())\nmain()\n"
    )
    done = sandmill.python("-c", code, "--help")
    assert (done.returncode, done.stdout, done.stderr) == (-2, b"", b"")
