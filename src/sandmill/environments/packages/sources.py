"""A requirement that no wheel satisfies in; its source archive out, fetched and never opened. Indexes are those of pip's configuration."""

from __future__ import annotations

import ast
import difflib
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.requirements import InvalidRequirement, Requirement

from sandmill.config.hosts import PRESETS
from sandmill.environments.verdicts import reason_of
from sandmill.errors import EnvironmentFailed

if TYPE_CHECKING:
    from unearth import Link, PackageFinder

_ASK_S: Final = 60.0
_LARGEST_ARCHIVE: Final = 1 << 30
_CHUNK: Final = 1 << 20


def fetch_source(requirement: str, target: Path, versions: Sequence[str] = ()) -> Path:
    """The newest source archive that fits, in the folder `target`. `versions`: those with a wheel. Raises EnvironmentFailed."""
    from unearth import PackageFinder  # takes a quarter of a second, and hardly anything is there as source only
    from unearth.errors import UnpackError

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement:
        raise EnvironmentFailed(f"no wheel of {requirement[:100]!a} fits this machine") from None
    indexes, places = _configured()
    try:
        with_links = [place if "://" in place else Path(place).expanduser().resolve().as_uri() for place in places if _exists(place)]
        finder = PackageFinder(index_urls=indexes, find_links=with_links, no_binary=[wanted.name], verbosity=-1)
        best = finder.find_best_match(wanted).best
        if best is None:
            near = difflib.get_close_matches(requirement.partition("==")[2], versions, n=1, cutoff=0.6) or list(versions[-1:])
            hint = f"the nearest version is {near[0]}" if near else "name another"
            raise EnvironmentFailed(f"there is no {requirement} that fits this Python, neither as a wheel nor as source; {hint}")
        return _fetched(finder, best.link, target)
    except (OSError, UnpackError, ValueError, RuntimeError) as error:
        if isinstance(error, EnvironmentFailed):
            raise
        raise EnvironmentFailed(f"the source of {requirement} could not be fetched: {reason_of(error)}") from error


def _fetched(finder: PackageFinder, link: Link, target: Path) -> Path:
    name = Path(link.filename).name
    place = target / name
    if link.is_file:
        data = link.file_path.read_bytes()
    else:
        answer = finder.session.get(link.url_without_fragment)
        if answer.status_code != 200:
            raise EnvironmentFailed(f"{name} could not be fetched: the index answered {answer.status_code}")
        data = b"".join(answer.iter_bytes(_CHUNK))
    if len(data) > _LARGEST_ARCHIVE:
        raise EnvironmentFailed(f"{name} is larger than {_LARGEST_ARCHIVE} bytes; build a wheel of it yourself")
    for kind, digests in (link.hash_option or {}).items():
        if kind in hashlib.algorithms_guaranteed and hashlib.new(kind, data).hexdigest() not in digests:
            raise EnvironmentFailed(f"{name} is not what the index promised: its {kind} differs; try again")
    place.write_bytes(data)
    return place


def _configured() -> tuple[list[str], list[str]]:
    """Index URLs and places of links, from pip's own configuration."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
        timeout=_ASK_S,
        check=False,
    )
    found: dict[str, list[str]] = {"index-url": [], "extra-index-url": [], "find-links": [], "no-index": []}
    for line in asked.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in found:
            words = str(ast.literal_eval(value)).split()
            found[name] = words if name == "index-url" else [*found[name], *words]
    if found["no-index"] and found["no-index"][-1].lower() in ("1", "true", "yes", "on"):
        return [], found["find-links"]
    return [*(found["index-url"] or [f"https://{PRESETS['pypi'][0]}/simple"]), *found["extra-index-url"]], found["find-links"]


def _exists(place: str) -> bool:
    return "://" in place or Path(place).expanduser().exists()
