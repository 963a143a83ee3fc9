"""The `sandmill` command. `main` is its entry point; everything heavy is imported by the command that needs it."""

from __future__ import annotations


def main() -> None:
    """Runs the command line of this process and exits with its code (see `failures` for the codes)."""
    from sandmill.cli.app import run

    raise SystemExit(run())
