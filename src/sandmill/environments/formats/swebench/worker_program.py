"""What runs inside a sandbox to ask the `swebench` package: a request as JSON on standard input, the answer as JSON on standard output.

    {"call": "describe", "row": {...}}  ->  {"eval_script": ..., "log_parser": ..., "eval_type": ...}     releases 4.x
    {"call": "parse", "row": {...}, "log_parser": ..., "log": PATH}  ->  {"status": {test: word}}

Only the parts of the package that make scripts and read logs are imported; what they import and do not use may be missing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

UNUSED = (
    "bs4",
    "chardet",
    "datasets",
    "docker",
    "dotenv",
    "ghapi",
    "git",
    "huggingface_hub",
    "modal",
    "requests",
    "rich",
    "tenacity",
    "tqdm",
    "yaml",
)
"""What the package imports and these parts of it do not need."""
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"


class Absent(types.ModuleType):
    """A module that is not installed. Its names exist and are good for nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Absence(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Found last: those of UNUSED that are not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main() -> int:
    """Answers one request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    folder = sys.argv[1]
    sys.path.insert(0, folder)
    sys.meta_path.append(Absence())
    for name in ("swebench", "swebench.harness", "swebench.harness.test_spec"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(folder, *name.split("."))]
        sys.modules[name] = package
    calls = {"describe": describe, "parse": parse}
    json.dump(calls[request["call"]](request), answers)
    answers.close()
    return 0


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of a row that does not carry one."""
    row = request["row"]
    constants = importlib.import_module("swebench.harness.constants")
    specs = getattr(constants, "MAP_REPO_VERSION_TO_SPECS", None)
    if specs is None:
        raise SystemExit("this release of swebench (5.x) has no evaluations of its own: the row needs eval_script and log_parser")
    if row["repo"] not in specs or row["version"] not in specs[row["repo"]]:
        raise SystemExit(f"swebench knows no version {row['version']!r} of {row['repo']!r}")
    scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    known = specs[row["repo"]][row["version"]]
    lines = scripts.make_eval_script_list(row, known, "testbed", "/testbed", row["base_commit"], row["test_patch"])
    only = row["repo"] in getattr(constants, "FAIL_ONLY_REPOS", ())
    script = "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"
    return {"eval_script": script, "log_parser": "", "eval_type": "fail_only" if only else "pass_and_fail"}


def parse(request: dict[str, Any]) -> dict[str, Any]:
    """What every test of a log came to."""
    row = request["row"]
    parsers = importlib.import_module("swebench.harness.log_parsers")
    name = request["log_parser"]
    parser = parsers.PARSER_REGISTRY.get(name) if name else parsers.MAP_REPO_TO_PARSER.get(row["repo"])
    if parser is None:
        raise SystemExit(f"this release of swebench has no parser {name or row['repo']!r}")
    with open(request["log"], encoding="utf-8", errors="replace") as file:
        log = file.read()
    inner = log.split(START, 1)[1].split(END, 1)[0] if START in log else log
    spec = types.SimpleNamespace(**row)
    found = parser(inner, spec) or parser(log, spec)
    return {"status": {str(test): str(getattr(word, "value", word)) for test, word in found.items()}}


if __name__ == "__main__":
    sys.exit(main())
