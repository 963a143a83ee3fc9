"""`nemo-gym/SERVER@VERSION`: a resources server of NeMo Gym, with its bundled example rows or rows of one's own.

The wheel asks for a Python that few machines have and for much that a resources server never imports: it is taken by itself, with what the
servers do import beside it, and runs on the Python that sandboxes have. What one server needs beyond that is named in `requirements`. Other
options are fields of the server's configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.formats.plan import FIELD, CommonOptions, Plan, Reference, adapter, parse_options
from sandmill.environments.packages.package import FILES, Copied
from sandmill.errors import ConfigError

EXAMPLE: Final = "0.7.0"
BESIDE: Final = (
    "aiohttp==3.14.5",
    "fastapi==0.165.0",
    "httptools==0.9.0",
    "httpx==0.28.1",
    "hydra-core==1.3.8",
    "itsdangerous==2.2.0",
    "mcp==1.30.0",
    "omegaconf==2.3.1",
    "openai==2.44.0",
    "orjson==3.13.0",
    "pandas==3.1.1",
    "pydot==4.0.1",
    "pyyaml==6.0.4",
    "requests==2.34.2",
    "rich==15.0.0",
    "scipy==1.17.1",
    "uvicorn==0.54.0",
    "wandb==0.31.0",
    "yappi==1.7.6",
)
"""What resources servers import, of what nemo-gym asks for."""


class NemoGymOptions(CommonOptions, frozen=True, kw_only=True, rename="camel"):
    """Besides the common ones."""

    data: str = ""
    """A JSONL file of rows to train on; empty: the server's examples."""
    held_out: str = ""
    """A JSONL file of rows that are held out."""
    configuration: str = ""
    """One of the server's configs/*.yaml; empty: the one of its name."""


def plan(reference: Reference, section: EnvironmentSection) -> Plan:
    """See `Format`."""
    version = reference.needed_version(EXAMPLE)
    options, arguments = parse_options(NemoGymOptions, section.options, others=True)
    rows = {"train": options.data, **({"heldout": options.held_out} if options.held_out else {})}
    for field, path in (("data", options.data), ("heldOut", options.held_out)):
        if path and not Path(path).expanduser().is_file():
            raise ConfigError(f"there is no file {path[:200]}", field=f"{FIELD}.{field}")
    copied = tuple(Copied(source=str(Path(path).expanduser()), place=f"rows/{split}.jsonl") for split, path in rows.items() if path)
    return Plan(
        reference=reference.text,
        name=f"nemo-gym/{reference.what}",
        version=version,
        package=options.package(BESIDE, bare=(f"nemo-gym=={version}",), files=copied),
        adapter=adapter("nemo_gym"),
        beside={"turns": adapter("turns")},
        load={
            "server": reference.what,
            "rows": {split: f"{FILES}/rows/{split}.jsonl" if path else "" for split, path in rows.items()},
            "configuration": options.configuration,
            "arguments": arguments,
        },
        common=options,
        source=options.data or reference.text,
    )
