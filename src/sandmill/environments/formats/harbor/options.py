"""The options of `harbor/PATH` in a manifest; a frozen record out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sandmill.config.check import nearest
from sandmill.environments.formats.records import record
from sandmill.environments.verifying.verify import check_take
from sandmill.errors import ConfigError

_WORDS = {"run": ("execute", "skip"), "network": ("deny", "as-task"), "at_timeout": ("failure", "unsolved")}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How task folders are used here."""

    base: str = ""
    """What a Dockerfile starts from when the store does not have its FROM: an image's name, or `host`. Empty: that is refused."""
    run: str = "execute"
    """`skip` passes a Dockerfile's RUN over, for bases that have everything already."""
    build_hosts: tuple[str, ...] = ()
    """Host names that RUN may reach while an image is built."""
    network: str = "deny"
    """`as-task` gives agent and verifier the network that the task's network_mode names; `deny` none."""
    take: tuple[str, ...] = ()
    """Paths besides the workdir that an agent's work may be in; `/`: all but the system's."""
    tools: str = ""
    """A folder of Python packages that tests need, as `pip install --target` makes one."""
    at_timeout: str = "failure"
    """What a verifier that does not end in time means: `failure` no reward; `unsolved` a reward of 0, where programs of the agent's may
    run for ever and verifiers are known to be quick."""
    pass_at: float = 1.0
    """The reward from which a task counts as solved."""
    verifiers: Annotated[int, Meta(ge=1)] = 2
    """How many may run at once."""


def parse_options(options: Mapping[str, object]) -> Options:
    """Checks names, types and values. Raises ConfigError naming the option and the nearest valid one."""
    found = record(options, Options, "options")
    for field, words in _WORDS.items():
        value = getattr(found, field)
        if value not in words:
            near = nearest(value, words)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"it is one of {', '.join(words)}, not {value[:60]!r}{hint}", field=f"options.{field}")
    for path in found.take:
        check_take(path, "options.take")
    if found.tools and not Path(found.tools).is_dir():
        raise ConfigError(f"there is no folder {found.tools!r}", field="options.tools")
    return found
