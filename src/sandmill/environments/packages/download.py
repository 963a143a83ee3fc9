"""Requirements in; wheel files in a folder out. pip does the choosing and fetching, as this machine's own configuration says.

Only wheels are taken: fetching one runs no code of its author. What exists as source only is fetched as an archive that nobody opens
here, and built in a sandbox without a network (building.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sandmill.errors import EnvironmentFailed

DOWNLOAD_TIMEOUT_S: Final = 1800.0
_LONGEST_OUTPUT: Final = 1 << 20
_MISSING: Final = re.compile(r"^ERROR: No matching distribution found for ([^\n]+)$", re.MULTILINE)
_VERSIONS: Final = re.compile(r"\(from versions: ([^)\n]+)\)")


class NoWheel(EnvironmentFailed, LookupError):
    """No wheel of `requirement` fits. `said`: pip's own words, one line; `versions`: those that have one, the newest last."""

    def __init__(self, requirement: str, said: str, versions: tuple[str, ...] = ()) -> None:
        self.requirement = requirement
        self.versions = versions
        super().__init__(said)


async def download(wanted: Sequence[str], target: Path, python: str, *, dependencies: bool, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> None:
    """Fetches wheels into `target`, where those that lie there already count. Raises NoWheel, EnvironmentFailed."""
    if not wanted:
        return
    arguments = ["--only-binary", ":all:", "--find-links", str(target), "--dest", str(target), "--progress-bar", "off", "--no-input"]
    if not dependencies:  # taken without anything that it asks for, a newer Python included
        arguments += ["--no-deps", "--ignore-requires-python"]
    code, said = await _pip(python, ["download", *arguments, "--", *wanted], timeout_s)
    if code == 0:
        return
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    words = lines[0][:400] if lines else (said.strip().splitlines() or ["it said nothing"])[-1][:400]
    if missing := _MISSING.search(said):
        requirement = missing[1].split(" (from ")[0].strip()
        wanted_version = re.escape(requirement.partition("==")[2])
        if other := re.search(rf"\b{wanted_version} Requires-Python ([^\n;]+)", said):
            raise EnvironmentFailed(f"{requirement} needs Python {other[1].strip()}, and {python} is another; install that one, or name it")
        versions = _VERSIONS.search(said)
        raise NoWheel(requirement, words, tuple(versions[1].split(", ")) if versions and versions[1] != "none" else ())
    raise EnvironmentFailed(f"pip could not fetch {', '.join(wanted)[:200]}: {words}")


async def _pip(python: str, arguments: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Runs this interpreter's pip for another one: tags and markers are those of the Python that will run what is fetched."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PIP_NO_COLOR": "1", "PYTHONNOUSERSITE": "1"},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        raise EnvironmentFailed(f"pip did not end within {timeout_s:g} s; try again") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(asyncio.ensure_future(process.wait()))
    text = output[-_LONGEST_OUTPUT:].decode("utf-8", "replace")
    if "No module named pip" in text:
        raise EnvironmentFailed(f"{sys.executable} has no pip, which fetches packages; install it with: python -m ensurepip")
    return process.returncode or 0, text
