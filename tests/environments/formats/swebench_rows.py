"""A repository as small as one can be, its rows, and a package in the shape of swebench: the real one runs in tests/peers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from installed import only_index, removed_after

from sandmill.sandboxes import Image, Sandbox

sys.path.append(str(Path(__file__).parents[1] / "packages"))
from package_files import wheel

CODE = "def add(a, b):\n    return a - b\n\n\ndef zero():\n    return 0\n"
TESTS = "from adding import add, zero\n\n\ndef test_zero():\n    assert zero() == 0\n"
FIX = """diff --git a/adding.py b/adding.py
--- a/adding.py
+++ b/adding.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def zero():
"""
TEST_PATCH = """diff --git a/test_adding.py b/test_adding.py
--- a/test_adding.py
+++ b/test_adding.py
@@ -3,3 +3,7 @@
 
 def test_zero():
     assert zero() == 0
+
+
+def test_add():
+    assert add(2, 3) == 5
"""
EVALUATION = """#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout HEAD test_adding.py
git apply -v - <<'END_OF_PATCH'
{test_patch}
END_OF_PATCH
: '>>>>> Start Test Output'
PYTHONPATH=/.sandmill/site:$PYTHONPATH python3 -m pytest -rA -p no:cacheprovider test_adding.py
: '>>>>> End Test Output'
git checkout HEAD test_adding.py
"""
RELEASE, OTHER, BROKEN = "99.1", "99.2", "99.3"
"""Of packages that nobody published: a published one may be installed already."""
PARSER = """
def parse(log, spec):
    found = {}
    for line in log.split("\\n"):
        words = line.split()
        if len(words) > 1 and words[0] in ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"):
            found[words[1]] = words[0]
    return found

PARSER_REGISTRY = {"parse_log_pytest": parse}
"""
DOCKERFILE = """FROM host
USER root
COPY . /testbed
WORKDIR /testbed
RUN git init -q . && git add -A && git -c user.name=a -c user.email=a commit -qm base
"""


def row(**changes: object) -> dict[str, object]:
    """One row of the 5.x kind."""
    return {
        "instance_id": "own__adding-1",
        "repo": "own/adding",
        "base_commit": "HEAD",
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "add subtracts",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(["test_adding.py::test_add"]),
        "PASS_TO_PASS": ["test_adding.py::test_zero"],
        "image": "tests/adding",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": EVALUATION.format(test_patch=TEST_PATCH),
        **changes,
    }


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@contextlib.contextmanager
def index(folder: Path) -> Iterator[Path]:
    """The only place that pip looks at meanwhile: a folder with packages of swebench's shape. What was installed is removed after it."""
    files = {
        "swebench/__init__.py": "import docker, everything",
        "swebench/harness/constants/__init__.py": "",
    }
    folder.mkdir()
    for release in (RELEASE, OTHER):
        wheel(folder, "swebench", {**files, "swebench/harness/log_parsers/__init__.py": PARSER}, release)
    wheel(folder, "swebench", {**files, "swebench/harness/log_parsers/__init__.py": "import no_such_module"}, BROKEN)
    wheel(folder, "unidiff", {"unidiff/__init__.py": ""}, "1.0.1")
    with removed_after(), only_index(folder):
        yield folder


def build_image(root: Path) -> str:
    """Makes the repository's image, by the name in the rows; the commit that it begins with."""
    context = root / "repository"
    context.mkdir()
    (context / "adding.py").write_text(CODE)
    (context / "test_adding.py").write_text(TESTS)
    image = Image.build(DOCKERFILE, context, name="tests/adding")
    with Sandbox.create(image=image, server="") as sandbox:
        return sandbox.run("git", "rev-parse", "HEAD", timeout=30).stdout.decode().strip()
