"""`textarena/GAME@VERSION`: text games for one player, each task a game of its own seed. Other options go to the game.

A reply is a move. The reward is the game's own at its end; an episode that ends before its game gets `unfinished`.
"""

from __future__ import annotations

from typing import Final

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import CommonOptions, Plan, Reference, adapter, parse_options

EXAMPLE: Final = "0.7.4"
_SPREAD: Final = 1_000_003
_FIRST: Final = 1 << 30
HELD_OUT_OFFSET: Final = 1 << 30
"""Added to the seed for the held-out split."""


class TextArenaOptions(CommonOptions, frozen=True, kw_only=True, rename="camel"):
    """Options of a game."""

    unfinished: float = 0.0
    """The reward of an episode whose turns, tokens or time ran out before the game ended."""


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    version = reference.needed_version(EXAMPLE)
    common, arguments = parse_options(TextArenaOptions, section.options, others=True)
    seed = section.seed * _SPREAD % _FIRST
    return Plan(
        reference=reference.text,
        name=f"textarena/{reference.what}",
        version=version,
        package=common.package([f"textarena=={version}"]),
        adapter=adapter("textarena"),
        load={
            "game": reference.what,
            "arguments": arguments,
            "seeds": {"train": seed, "heldout": seed + HELD_OUT_OFFSET},
            "unfinished": common.unfinished,
        },
        common=common,
        source=reference.text,
    )
