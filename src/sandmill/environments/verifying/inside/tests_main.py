"""The process that pytest's tests run in. Nothing that an agent may have left in the working folder, or where PYTHONPATH points, is
imported before pytest and its plugins are: no start-up file, no module of a known name, no plugin by its metadata.

Command line: SITE FOLDERS ARGS..., where FOLDERS are joined by colons and come first on the path once pytest is set up.
"""

from __future__ import annotations

import importlib
import sys


class Folders:
    """A plugin that puts folders on the path when all plugins are loaded and no test file is."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def pytest_configure(self, config: object) -> None:
        """After all plugins are loaded."""
        sys.path[:0] = self._folders


def main(site: str, folders: str, args: list[str]) -> int:
    """Runs the session."""
    own = sys.path[0]
    sys.path[0] = site
    import pytest

    sys.path.insert(0, own)
    record = importlib.import_module("sandmill_record")
    del sys.path[0]
    return int(pytest.main(args, plugins=[record, Folders([one for one in folders.split(":") if one])]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
