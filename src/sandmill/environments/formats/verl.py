"""`verl/PATH[@VERSION]`: a data set of verl (parquet, json or jsonl) with `compute_score`: one's own or, with a version, verl's.

verl is installed without what it depends on: its rewards need none of that. Beside `reward`, other options are its keyword arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import FIELD, CommonOptions, Plan, Reference, adapter, parse_options
from sandmill.environments.packages.package import FILES, Copied
from sandmill.errors import ConfigError, UnknownEnvironment

EXAMPLE: Final = "0.9.1"
KINDS: Final = (".parquet", ".json", ".jsonl")
PYARROW: Final = "pyarrow==26.0.1"
NUMPY: Final = "numpy==2.4.6"
"""Its graders of code import it."""


class Options(CommonOptions, frozen=True, kw_only=True, rename="camel"):
    """Besides the common ones."""

    held_out: str = ""
    """The file of held-out rows; without it, both splits are drawn from one file."""
    reward: str = ""
    """`path/to/file.py[:function]`, called as verl calls a custom reward function."""


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    options, arguments = parse_options(Options, section.options, others=bool(section.options.get("reward")))
    sources = {"train": reference.what, **({"heldout": options.held_out} if options.held_out else {})}
    copied, data = [], {}
    for split, text in sources.items():
        path = _file(text, "spec.environment.name" if split == "train" else f"{FIELD}.heldOut")
        copied.append(Copied(source=str(path), place=f"data/{split}{path.suffix}", secret=True))
        data[split] = {"file": f"{FILES}/data/{split}{path.suffix}", "name": text}
    reward, function = _reward(options.reward, reference)
    if reward is not None:
        copied.append(Copied(source=str(reward), place=f"reward/{reward.name}"))
    requirements = [
        *([NUMPY] if reward is None else []),
        *([PYARROW] if any(text.endswith(".parquet") for text in sources.values()) else []),
    ]
    return Plan(
        reference=reference.text,
        name=f"verl/{Path(reference.what).stem}",
        version=reference.version,
        package=options.package(requirements, bare=(f"verl=={reference.version}",) if reference.version else (), files=tuple(copied)),
        adapter=adapter("verl"),
        load={
            "data": data,
            "reward": None if reward is None else f"{FILES}/reward/{reward.name}",
            "function": function,
            "arguments": arguments,
        },
        common=options,
        source=reference.what,
    )


def _file(text: str, field: str) -> Path:
    path = Path(text).expanduser()
    if path.suffix not in KINDS:
        raise ConfigError(f"{text[:200]!a} is no data set of verl; those end in {', '.join(KINDS)}", field=field)
    if not path.is_file():
        raise UnknownEnvironment(f"there is no file {text}")
    return path


def _reward(text: str, reference: Reference) -> tuple[Path | None, str]:
    """The file and function of the user's own reward."""
    if not text:
        reference.needed_version(EXAMPLE)
        return None, "default_compute_score"
    place, _, function = text.partition(":")
    path = Path(place).expanduser()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(
            f"there is no Python file {place[:200]!a}; write path/to/file.py or path/to/file.py:function", field=f"{FIELD}.reward"
        )
    return path, function or "compute_score"
