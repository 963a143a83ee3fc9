"""The words that name files and fill them, and who may see which: word pools by split and seed.

| pool       | demonstrations | reinforcement learning | used by split |
|------------|----------------|------------------------|---------------|
| `train`    | yes            | yes                    | train         |
| `tuning`   | yes            | never                  | tuning        |
| `heldout`  | yes            | never                  | heldout       |
| `unseen`   | never          | never                  | unseen        |

No word contains another, so that `grep` for one never matches the other.
"""

from __future__ import annotations

from sandmill.environments.splits import partition

_TEXT = """
acorn amber anchor apple aspen autumn bacon badge bamboo banana basil basket beach beacon berry birch bison blossom border
bottle branch breeze brick bridge bronze brook bucket butter button cabin cactus camel candle canoe canyon carbon carpet castle
cedar cello cherry chess cider circle citrus clay cliff clock cloud clover cobalt coffee comet copper coral cotton crane crater
creek cricket crow crystal daisy dawn delta desert diamond dolphin dragon dune eagle earth ebony ember engine fable
falcon feather fern field finch flame flint flora forest fossil fox frost galaxy garden garnet ginger glacier glass globe granite
grape grove gull hammer harbor harvest hawk hazel helmet heron hickory honey horizon horse island ivory ivy jasmine jasper jungle
juniper kayak kernel kettle kite ladder lagoon lantern larch laurel lava lemon lilac linen lion lotus lunar magnet mango maple
marble marsh meadow melon mercury meteor mint mirror mist moss mountain nectar needle nest nickel night north nova nutmeg oasis
ocean olive onion onyx opal orange orbit orchid otter oyster palm panda paper peach pearl pebble pepper piano pigeon pine planet
plum pocket pollen pond poppy prairie prism quail quartz rabbit radar rain raven reef ribbon river robin rocket rose ruby
saddle saffron sage sailor salmon sand sapphire satin shadow shell silver sky snow socket solar sparrow spice spring spruce squid
star steel stone storm summer sunset swan table thistle thunder tiger timber topaz torch tower trail tulip tundra turtle valley
vapor velvet violet walnut water wave willow window winter wolf wool yarrow zebra zinc
"""
WORDS: tuple[str, ...] = tuple(_TEXT.split())

SPLITS = ("train", "tuning", "heldout", "unseen")
_SHARES = {"train": 0.55, "tuning": 0.15, "heldout": 0.15, "unseen": 0.15}


def word_pools(seed: int) -> dict[str, tuple[str, ...]]:
    """Disjoint word pools, one per split, drawn by the environment's seed."""
    return partition(WORDS, _SHARES, seed)


def demonstration_pool(seed: int) -> tuple[str, ...]:
    """The words that demonstrations use: all but those of split `unseen`."""
    pools = word_pools(seed)
    return pools["train"] + pools["tuning"] + pools["heldout"]
