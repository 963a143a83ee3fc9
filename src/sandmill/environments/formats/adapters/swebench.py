"""Runs beside the `swebench` package, in its sandbox: makes the evaluations of 4.x rows, and reads the logs of tests.

Only the parts that make scripts and read logs are imported; what they import and do not use is not installed.
"""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
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
    "typer",
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


class SweBench:
    """One release of the package."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("swebench")
        if found is None or not found.submodule_search_locations:
            raise ModuleNotFoundError("there is no package swebench")
        sys.meta_path.append(Absence())
        folder = found.submodule_search_locations[0]
        for name in ("swebench", "swebench.harness", "swebench.harness.test_spec"):
            package = types.ModuleType(name)  # its own __init__ would import everything
            package.__path__ = [os.path.join(folder, *name.split(".")[1:])]
            sys.modules[name] = package
        self.parsers: Any = importlib.import_module("swebench.harness.log_parsers")
        self.constants: Any = importlib.import_module("swebench.harness.constants")
        self.specs: Any = getattr(self.constants, "MAP_REPO_VERSION_TO_SPECS", None)
        self.scripts: Any = importlib.import_module("swebench.harness.test_spec.create_scripts") if self.specs else None

    def describe(self) -> dict[str, Any]:
        """See protocol.Description. It has no tasks of its own."""
        return {"name": "swebench", "version": importlib.metadata.version("swebench"), "splits": {}}

    def evaluation(self, row: dict[str, Any]) -> dict[str, Any]:
        """How the tests of a row that does not say it are run."""
        if self.specs is None:
            raise LookupError("this release of swebench (5.x) has no evaluations of its own: the row needs eval_script and log_parser")
        if row["repo"] not in self.specs or row["version"] not in self.specs[row["repo"]]:
            raise LookupError(f"swebench knows no version {row['version']!r} of {row['repo']!r}")
        known = self.specs[row["repo"]][row["version"]]
        lines = self.scripts.make_eval_script_list(row, known, "testbed", "/testbed", row["base_commit"], row["test_patch"])
        only = row["repo"] in getattr(self.constants, "FAIL_ONLY_REPOS", ())
        script = "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"
        return {"eval_script": script, "log_parser": "", "eval_type": "fail_only" if only else "pass_and_fail"}

    def parse(self, row: dict[str, Any], log_parser: str, log: str) -> dict[str, Any]:
        """What every test of a log (base64) came to."""
        names = getattr(self.parsers, "PARSER_REGISTRY" if log_parser else "MAP_REPO_TO_PARSER", {})
        parser = names.get(log_parser or row["repo"])
        if parser is None:
            raise LookupError(f"this release of swebench has no parser {log_parser or row['repo']!r}")
        text = base64.b64decode(log).decode("utf-8", "replace")
        inner = text.split(START, 1)[1].split(END, 1)[0] if START in text else text
        spec = types.SimpleNamespace(**row)
        found = parser(inner, spec) or parser(text, spec)
        return {"status": {str(test): str(getattr(word, "value", word)) for test, word in found.items()}}


def load(options: dict[str, Any]) -> SweBench:
    """See worker.load."""
    return SweBench()
