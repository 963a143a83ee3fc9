"""A patch as bytes: whatever its line ends and its last line are, they stay. In: an agent's repository. Out: its patch; and a
script that applies one and evaluates it.
"""

from __future__ import annotations

import re
from typing import Final

from sandmill.environments.verifying.toolbox import PLUGIN, RECORDS

LARGEST_PATCH_BYTES: Final = 16 << 20
UNAPPLIED: Final = "/logs/verifier/unapplied"
CONFIGURATION: Final = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml",
                        "sitecustomize.py", "usercustomize.py")  # fmt: skip
"""Files that can say what tests come to without any fix. A patch's changes of them count only where the reference patch changes them too."""
_NAMED: Final = re.compile(rb"^(?:\+\+\+ b/|--- a/|rename to |rename from |diff --git a/)([^\t\n\r]+)", re.MULTILINE)

DIFF: Final = (
    "cd /testbed && git config --global --add safe.directory '*' && "
    "git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.excludesFile=/dev/null add -A >/dev/null && "
    "git -c core.fsmonitor=false -c core.hooksPath=/dev/null diff --cached --binary --no-color --no-ext-diff --no-textconv "
)
"""Followed by the commit. In the agent's own sandbox, with the agent's own git: what comes out is only ever a patch."""

_APPLY: Final = """#!/bin/bash
cd /testbed || exit 97
git config --global --add safe.directory '*'
git config --global core.autocrlf false
applied=
if [ ! -s /tests/patch.diff ]; then applied=empty
elif git apply --verbose /tests/patch.diff; then applied=plain
elif git apply --verbose --3way /tests/patch.diff && [ -z "$(git ls-files --unmerged)" ]; then applied=3way
else
    git reset -q --hard && git clean -qfd
    if git apply --verbose --reject /tests/patch.diff; then applied=reject
    else
        git reset -q --hard && git clean -qfd
        if patch --batch --fuzz=5 -p1 -i /tests/patch.diff; then applied=fuzz; fi
    fi
fi
if [ -z "$applied" ]; then echo no > UNAPPLIED; exit 0; fi
"""
_RESTORE: Final = """restore() {
    if git cat-file -e "HEAD:$1" 2>/dev/null; then git checkout -q HEAD -- "$1"; else rm -rf -- "$1"; fi
}
"""


def touched(patch: bytes) -> frozenset[str]:
    """Paths that a patch names."""
    names = {match[1].strip().removesuffix(b"\r").decode("utf-8", "surrogateescape") for match in _NAMED.finditer(patch)}
    return frozenset(part.strip('"') for name in names for part in name.split(" b/"))


def configuration_of(patch: bytes, reference: bytes) -> tuple[str, ...]:
    """What of the patch is about how tests run and not in the reference patch; plain relative paths only."""
    own = touched(patch) - touched(reference)
    return tuple(sorted(path for path in own if _decides(path) and _plain(path)))


def _decides(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name in CONFIGURATION or name.endswith(".pth")


def _plain(path: str) -> bool:
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\n" not in path and "\0" not in path


def script(patch: bytes, reference: bytes) -> bytes:
    """What applies /tests/patch.diff by the four ways of the field, takes back configuration, and runs /tests/eval.sh."""
    quoted = [f"restore {_quoted(path)}" for path in configuration_of(patch, reference)]
    record = f"export SANDMILL_RECORD={RECORDS}/pytest.jsonl\nexport PYTHONPATH={PLUGIN}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    record += 'export PYTEST_ADDOPTS="-p sandmill_record${PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}"\n'
    text = _APPLY.replace("UNAPPLIED", UNAPPLIED) + _RESTORE + "\n".join(quoted) + f"\n{record}exec /bin/bash /tests/eval.sh\n"
    return text.encode("utf-8", "surrogateescape")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
