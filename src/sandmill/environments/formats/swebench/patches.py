"""A patch as bytes, its line ends and its last line as they are. In: an agent's repository. Out: its patch; a script that evaluates one."""

from __future__ import annotations

import re
from typing import Final

from sandmill.environments.verifying.toolbox import PLUGIN, RECORDS

LARGEST_PATCH_BYTES: Final = 16 << 20
UNAPPLIED: Final = "/logs/verifier/unapplied"
PATCH: Final = "/tests/patch.diff"
ALLOWED: Final = "/tests/allowed"
EVALUATION: Final = "/tests/eval.sh"
CONFIGURATION: Final = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-info/*", "*.dist-info/*", "*.egg-link"),
)
"""Files that can say what tests come to without any fix: a patch's changes of them count only where the reference patch has some too."""
_NAMED: Final = re.compile(rb"^(?:\+\+\+ b/|--- a/|rename to |rename from )([^\t\n\r]+)", re.MULTILINE)
_INTO_GIT: Final = re.compile(rb"^(?:\+\+\+|---|rename|copy|diff --git|Index:) .*\.git/", re.MULTILINE | re.IGNORECASE)

DIFF: Final = (
    "cd /testbed && git config --global --add safe.directory '*' && "
    "git -c core.fsmonitor=false -c core.hooksPath=/dev/null add -A > /dev/null && "
    "git -c core.fsmonitor=false -c core.hooksPath=/dev/null diff --cached --binary --no-color --no-ext-diff --no-textconv "
)
"""Followed by the commit. In the agent's own sandbox, with the agent's own git: what comes out is only ever a patch."""

_SCRIPT: Final = """#!/bin/bash
cd /testbed || exit 97
git config --global --add safe.directory '*'
git config --global core.autocrlf false
git ls-files -z --others | sort -z > /tests/before
anew() { git reset -q --hard && git ls-files -z --others | sort -z | comm -z -13 /tests/before - | xargs -0 -r rm -rf --; }
applied=
if [ ! -s PATCH ]; then applied=empty
elif git apply --verbose PATCH; then applied=plain
elif git apply --verbose --3way PATCH && [ -z "$(git ls-files --unmerged)" ]; then applied=3way
else
    anew
    if git apply --verbose --reject PATCH; then applied=reject
    else
        anew
        if patch --batch --fuzz=5 -p1 -i PATCH; then applied=fuzz; fi
    fi
fi
if [ -z "$applied" ]; then echo no > UNAPPLIED; exit 0; fi
echo "patch: $applied"
{ git diff -z --name-only --no-renames HEAD; git ls-files -z --others | sort -z | comm -z -13 /tests/before -; } |
while IFS= read -r -d '' path; do
    case "$path" in
    CONFIGURATION)
        grep -qxzF -- "$path" ALLOWED && continue
        echo "taken back: configuration of tests"
        if git cat-file -e "HEAD:$path" 2> /dev/null; then git checkout -q HEAD -- "$path"; else git rm -q --cached -- "$path" 2> /dev/null; rm -rf -- "$path"; fi ;;
    esac
done
export SANDMILL_RECORD=RECORDS/pytest.jsonl
export PYTHONPATH=PLUGIN${PYTHONPATH:+:$PYTHONPATH}
export PYTEST_ADDOPTS="-p sandmill_record${PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}"
exec /bin/bash EVALUATION
"""  # noqa: E501 - one command


def script() -> bytes:
    """What applies the patch by the four ways of the field, takes back configuration of tests, and runs the evaluation."""
    words = {"PATCH": PATCH, "UNAPPLIED": UNAPPLIED, "ALLOWED": ALLOWED, "RECORDS": RECORDS, "PLUGIN": PLUGIN, "EVALUATION": EVALUATION}
    text = _SCRIPT.replace("CONFIGURATION", " | ".join(f"{one} | */{one}" for one in CONFIGURATION))
    return re.sub("|".join(words), lambda match: words[match[0]], text).encode()


def allowed(reference: bytes) -> bytes:
    """Paths that the reference patch changes, each with a NUL after it."""
    names = {match[1].strip().strip(b'"') for match in _NAMED.finditer(reference)}
    return b"".join(name + b"\0" for name in sorted(names))


def reaches_git(patch: bytes) -> bool:
    """Whether a patch names something in the repository's own folder, which git refuses and the last of the four ways would not."""
    return _INTO_GIT.search(patch) is not None
