"""The console that every printed summary goes through: no markup, no guessing, and a closed pipe is an error like any other."""

from __future__ import annotations

from typing import IO

from rich.console import Console


class PlainConsole(Console):
    """Prints Text as it is; lines are never cut or wrapped by width. `file` None: stdout."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(file=file, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Rich would end the process with code 1; whoever called decides instead."""
        raise BrokenPipeError
