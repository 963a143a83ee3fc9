"""The options of `swebench/FILE` in a manifest; a frozen record out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from sandmill.environments.formats.records import record
from sandmill.errors import ConfigError


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows are used here."""

    image: str = ""
    """An image's name for rows that carry none, with {instance_id} in it. Empty: the benchmark's own name for it."""
    memory: str = "4Gi"
    disk: str = "4Gi"
    cpu: Annotated[float, Meta(gt=0)] = 1.0
    timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """Of one evaluation."""
    at_timeout: str = "unsolved"
    """What an evaluation that does not end in time means: `unsolved` as in the benchmark, or `failure`: no reward."""
    verifiers: Annotated[int, Meta(ge=1)] = 2
    """How many may be evaluated at once."""


def parse_options(options: Mapping[str, object]) -> Options:
    """Checks names, types and values. Raises ConfigError naming the option and the nearest valid one."""
    found = record(options, Options, "options")
    if found.at_timeout not in ("unsolved", "failure"):
        raise ConfigError(f"it is unsolved or failure, not {found.at_timeout[:60]!r}", field="options.at_timeout")
    return found
