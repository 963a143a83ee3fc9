"""The `sandmill` command. `main` is its entry point; everything heavy is imported by the command that needs it."""

from __future__ import annotations

import signal


def main() -> None:
    """Runs the command line of this process and exits with its code (see `failures` for the codes)."""
    # A Ctrl-C while modules are imported would end in a traceback; until somebody catches it, it ends the process as it does any program.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sandmill.cli.app import run

    raise SystemExit(run())
