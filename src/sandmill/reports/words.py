"""Numbers of a run in; the short words a person reads in a terminal out. What does not exist reads "unknown" or "-"."""

from __future__ import annotations

from collections.abc import Sequence

from sandmill.config.quantities import format_usd
from sandmill.reports.intervals import Interval, evaluation_interval
from sandmill.rollouts.events import EvaluationFinished, StepFinished

_BARS = "▁▂▃▄▅▆▇█"


def percent(value: float | None, digits: int = 0) -> str:
    """0.683 as "68 %"."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 2) -> str:
    """0.4117 as "0.41"; thousands are grouped."""
    return "-" if value is None else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """95 as "1:35", 7300 as "2:01:40"."""
    if seconds is None:
        return "?"
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def span(seconds: float) -> str:
    """A length of time: "0.42 s", "12.3 s", "4:05 min"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 120 else f"{duration(seconds)} {'min' if seconds < 3600 else 'h'}"


def size(size_bytes: float) -> str:
    """Bytes as MB or GB (powers of ten)."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def dollars(cost_microusd: int | None) -> str:
    """Dollars to the cent, smaller amounts to a hundredth of a cent or a micro-dollar; "unknown" when a price is unknown."""
    if cost_microusd is None or cost_microusd >= 100_000 or cost_microusd == 0:
        return format_usd(cost_microusd)
    return format_usd(cost_microusd, decimals=4 if cost_microusd >= 1000 else 6)


def interval_words(interval: Interval | None, *, signed: bool = False) -> str:
    """ "72 % [66, 77]", or with a sign "+52 [45, 58] points"."""
    if interval is None:
        return "-"
    low, high = 100 * interval.low, 100 * interval.high
    if signed:
        return f"{100 * interval.rate:+.1f} [{low:+.1f}, {high:+.1f}] points"
    return f"{100 * interval.rate:.1f} % [{low:.1f}, {high:.1f}]"


def sparkline(values: Sequence[float | None], low: float | None = None, high: float | None = None) -> str:
    """One character per value; a gap where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    least = min(known) if low is None else low
    most = max(known) if high is None else high
    spread = (most - least) or 1.0
    return "".join(" " if value is None else _BARS[min(7, max(0, int(7.999 * (value - least) / spread)))] for value in values)


def step_line(step: StepFinished, seconds_left: float | None) -> str:
    """One training step on one line."""
    parts = [
        f"step {step.step}/{step.steps}",
        f"reward {number(step.reward)}",
        f"pass {percent(step.pass_rate)} ({step.passed}/{step.graded})",
        f"{step.wall_s:.2f} s",
        f"{number(step.tokens_per_s, 0)} tok/s",
        f"cost {dollars(step.cost_microusd)}",
    ]
    if step.failures:
        parts.append(f"failures {step.failures}")
    return "  ".join([*parts, f"left {duration(seconds_left)}"])


def evaluation_line(evaluation: EvaluationFinished) -> str:
    """One evaluation on one line, with its 95 % interval."""
    way = "greedy" if evaluation.greedy else "sampled"
    rate = interval_words(evaluation_interval(evaluation))
    failed = f", failures {evaluation.failures}" if evaluation.failures else ""
    when = "" if evaluation.phase == "alone" else f" {evaluation.phase.value}"
    return f"{evaluation.split} {way}{when}: pass {rate} ({evaluation.passed}/{evaluation.graded}{failed}) in {span(evaluation.seconds)}"
