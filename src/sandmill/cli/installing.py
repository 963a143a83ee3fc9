"""What an installation or a check is at, in; lines on standard error out, and on a terminal one live line with its seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from sandmill.reports.inert import inert

Tell = Callable[[str], None]


def quiet(what: object) -> None:
    """Tells nobody."""


def plain(line: str) -> None:
    """One line, for pipes and logs."""
    print(inert(line, limit=200), file=sys.stderr, flush=True)


@contextlib.contextmanager
def telling(*, silent: bool) -> Iterator[tuple[Tell, Tell]]:
    """What tells of a new stage, which is worth a line, and of how far the stage has come, which only a terminal shows."""
    if silent:
        yield quiet, quiet
    elif not sys.stderr.isatty():
        yield plain, quiet
    else:
        with _live() as told:
            yield told


@contextlib.contextmanager
def _live() -> Iterator[tuple[Tell, Tell]]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty(), redirect_stderr=True) as bar:
        line = bar.add_task("starting", total=None)
        yield (
            lambda text: bar.reset(line, description=inert(text, limit=100)),
            lambda text: bar.update(line, description=inert(text, limit=100)),
        )


__all__ = ["Tell", "quiet", "telling"]
