"""Rows of SWE-bench: repositories with an issue, and the tests that its fix must pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.swebench.environment import SweBenchEnvironment
from sandmill.environments.formats.swebench.harness import DESCRIBING, READING, Harness
from sandmill.environments.formats.swebench.options import parse_options
from sandmill.environments.formats.swebench.rows import read_rows
from sandmill.environments.packages.install import Report
from sandmill.errors import ConfigError
from sandmill.sandboxes.dual import block_on

_PLACE: Final = re.compile(r"(?P<file>.+?)(?:@(?P<release>[0-9][0-9A-Za-z.]*))?")


def load(what: str, section: EnvironmentSection, report: Report) -> SweBenchEnvironment:
    """The rows of `FILE[@RELEASE]`. The package's release is what the rows need, unless it is named. Raises ConfigError,
    EnvironmentFailed."""
    match = _PLACE.fullmatch(what)
    path = Path(match["file"] if match else what).expanduser()
    options = parse_options(section.options)
    rows = [row for row in read_rows(path) if row.instance_id not in options.leave_out]
    if not rows:
        raise ConfigError("option leave_out leaves no row", field="options.leave_out")
    carried = all(row.eval_script and row.log_parser for row in rows)
    release = (match and match["release"]) or (READING if carried else DESCRIBING)
    harness = block_on(Harness.open(release, f"swebench/{what}", report))
    return SweBenchEnvironment(path.name, rows, options, section, harness)


__all__ = ["SweBenchEnvironment", "load"]
