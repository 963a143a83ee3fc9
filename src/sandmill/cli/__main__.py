"""`python -m sandmill.cli`: the same as `sandmill`."""

from __future__ import annotations

from sandmill.cli import main

main()
