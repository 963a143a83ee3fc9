"""`reasoning-gym/DATASET@VERSION`: generated puzzles with a scorer each. Other options are the dataset's own configuration.

Item i of a dataset is drawn from `seed + i`: the held-out split begins so far behind that no number of training tasks reaches it.
"""

from __future__ import annotations

from typing import Final

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import CommonOptions, Plan, Reference, adapter, parse_options

EXAMPLE: Final = "0.1.25"
_SPREAD: Final = 1_000_003
_FIRST: Final = 1 << 30
HELD_OUT_OFFSET: Final = 1 << 30
"""Added to the seed for the held-out split."""


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    version = reference.needed_version(EXAMPLE)
    common, config = parse_options(CommonOptions, section.options, others=True)
    seed = section.seed * _SPREAD % _FIRST
    return Plan(
        reference=reference.text,
        name=f"reasoning-gym/{reference.what}",
        version=version,
        package=common.package([f"reasoning-gym=={version}"]),
        adapter=adapter("reasoning_gym"),
        load={"dataset": reference.what, "config": config, "seeds": {"train": seed, "heldout": seed + HELD_OUT_OFFSET}},
        common=common,
        source=reference.text,
    )
