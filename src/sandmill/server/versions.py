"""The program's version, as the API tells it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION_NUMBER = version("sandmill")
except PackageNotFoundError:
    VERSION_NUMBER = "0.0"
