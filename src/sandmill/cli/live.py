"""The live display: a panel that rich repaints four times a second; finished evaluations and warnings scroll above it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sandmill.cli.progress import stage_words
from sandmill.cli.view import RunView
from sandmill.reports.breakdown import STEP_LABELS, shares
from sandmill.reports.inert import inert
from sandmill.reports.words import dollars, duration, evaluation_line, number, percent, sparkline
from sandmill.rollouts.events import EvaluationFinished, Event, StepFinished, Warned

_COLOURS = {
    "model": "blue",
    "command": "green",
    "grading": "magenta",
    "sandbox": "cyan",
    "other": "white",
    "training": "yellow",
    "publish": "bright_black",
    "saving": "bright_black",
}
BAR_WIDTH = 40


class LiveDisplay:
    """Shows a RunView. Its methods are called from the run's thread; rich's own thread repaints."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = inert(title, limit=200)
        self._console = console
        self._view = RunView()

    def show(self, event: Event) -> None:
        self._view.apply(event)
        if isinstance(event, EvaluationFinished):
            self._above(evaluation_line(event), "bold")
        elif isinstance(event, Warned):
            self._above(f"warning: {event.sentence}", "yellow")

    def say(self, sentence: str) -> None:
        self._above(sentence, "yellow")

    def _above(self, text: str, style: str) -> None:
        self._console.print(Text(inert(text), style=style))

    def __rich__(self) -> RenderableType:
        view = self._view
        rows: list[RenderableType] = [self._stage_row()]
        if view.step is not None:
            rows += [self._figures(view.step), self._time_bar(), self._legend()]
        return Panel(Group(*rows), title=Text(self._title), title_align="left", border_style="bright_black", padding=(0, 1))

    def _stage_row(self) -> Table:
        view = self._view
        row = Table.grid(padding=(0, 2))
        words = stage_words(view.stage, inert(view.detail, limit=60)) if view.stage is not None else "starting"
        done = f"{view.done}/{view.total}" if view.total else ""
        left = f"{duration(view.seconds_left)} left" if view.seconds_left is not None else duration(view.stage_seconds)
        bar = ProgressBar(total=view.total or None, completed=view.done, width=BAR_WIDTH, pulse=not view.total)
        flying = f"{view.in_flight} in flight" if view.in_flight else ""
        row.add_row(
            Text(words, style="bold"), bar, Text(done), Text(left), Text(flying, style="dim"), Text(inert(view.note, limit=40), style="dim")
        )
        return row

    def _figures(self, step: StepFinished) -> Table:
        view = self._view
        grid = Table.grid(padding=(0, 2))
        rates = sparkline(list(view.pass_rates), 0.0, 1.0)
        grid.add_row(_dim("reward"), Text(number(step.reward)), Text(sparkline(list(view.rewards)), style="blue"))
        grid.add_row(_dim("pass rate"), Text(percent(step.pass_rate)), Text(rates, style="green"))
        speed = f"{number(view.tokens_per_s, 0)} tokens/s  {step.wall_s:.2f} s a step"
        grid.add_row(_dim("speed"), Text(""), Text(speed))
        failures = Text(f"  failures {view.failures}", style="red" if view.failures else "dim")
        grid.add_row(_dim("cost"), Text(""), Text(f"{dollars(step.cost_microusd)} so far").append_text(failures))
        return grid

    def _time_bar(self) -> Text:
        bar = Text()
        filled, exact = 0, 0.0
        for key, share in shares(self._view.breakdown).items():
            exact += share * BAR_WIDTH
            cells = round(exact) - filled
            bar.append("█" * cells, style=_COLOURS.get(key, "white"))
            filled += cells
        return bar

    def _legend(self) -> Text:
        legend = Text()
        for key, share in shares(self._view.breakdown).items():
            if share >= 0.005:
                legend.append("■ ", style=_COLOURS.get(key, "white"))
                legend.append(f"{STEP_LABELS[key]} {percent(share)}  ", style="dim")
        return legend


@contextlib.contextmanager
def live_display(title: str) -> Iterator[LiveDisplay]:
    """A live display on stdout; the cursor is restored however the block ends."""
    console = Console(markup=False, highlight=False, emoji=False)
    shown = LiveDisplay(title, console)
    with Live(shown, console=console, refresh_per_second=4, transient=False, redirect_stdout=False, redirect_stderr=False):
        yield shown


def _dim(text: str) -> Text:
    return Text(text, style="dim")
