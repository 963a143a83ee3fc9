"""Rows of SWE-bench: repositories with an issue, and the tests that its fix must pass."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.swebench.environment import SweBenchEnvironment, tasks_of
from sandmill.environments.formats.swebench.harness import DESCRIBING, READING, Harness
from sandmill.environments.formats.swebench.options import parse_options
from sandmill.environments.formats.swebench.rows import Row, read_rows
from sandmill.environments.packages.install import Report
from sandmill.environments.splits import draw, kept
from sandmill.sandboxes.dual import block_on

_PLACE: Final = re.compile(r"(?P<file>.+?)(?:@(?P<release>[0-9][0-9A-Za-z.]*))?")


def load(what: str, section: EnvironmentSection, report: Report) -> SweBenchEnvironment:
    """The rows of `FILE[@RELEASE]`. The package's release is what the rows need, unless it is named. Raises ConfigError,
    EnvironmentFailed."""
    match = _PLACE.fullmatch(what)
    path = Path(match["file"] if match else what).expanduser()
    options = parse_options(section.options)
    rows = kept({row.instance_id: row for row in read_rows(path)}, section)
    release = (match and match["release"]) or release_for(rows.values())
    splits = draw(tasks_of(rows), section)  # what a person can get wrong is said before anything is installed
    return SweBenchEnvironment(path.name, rows, splits, options, block_on(Harness.open(release, f"swebench/{what}", report)))


def release_for(rows: Iterable[Row]) -> str:
    """The package's release that can grade the rows."""
    return READING if all(row.eval_script and row.log_parser for row in rows) else DESCRIBING


__all__ = ["SweBenchEnvironment", "load", "release_for"]
