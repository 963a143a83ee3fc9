"""Names of the models that need no download. In: a uri. Out: whether it can be one, told without loading anything."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

TINY_SHELL: Final = "sandmill/tiny-shell"
TINY_TEXT: Final = "sandmill/tiny-text"
SMOLLM2: Final = "sandmill/smollm2-135m"
BUNDLED: Final = (TINY_SHELL, TINY_TEXT, SMOLLM2)
UNTRAINED: Final = (TINY_SHELL, TINY_TEXT)
"""Their weights are drawn when they are loaded: they know nothing before a warm start."""


def unknown(uri: str) -> str:
    """What to say of a bundled model that does not exist."""
    near = difflib.get_close_matches(uri, BUNDLED, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no bundled model {uri}; bundled models are {', '.join(BUNDLED)}{hint}"


def missing(uri: str) -> str | None:
    """Why a model cannot be loaded, as far as its name and this machine's folders tell; None otherwise."""
    if uri.startswith("sandmill/"):
        return None if uri in BUNDLED else unknown(uri)
    if not uri.startswith("hf://") and not (Path(uri) / "config.json").is_file():
        return f"there is no model folder {uri} with a config.json"
    return None
