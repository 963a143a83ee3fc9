"""A run's record in; one self-contained report.html out.

The page is a template, one stylesheet and one script, all inline and allowed by their hash alone: its policy forbids any other
script, style, connection, image, frame or form. Data travels as JSON that the script only ever turns into text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import os
import string
import tempfile
from importlib import resources
from pathlib import Path

from sandmill.errors import DiskFull, RunError
from sandmill.reports.console import PlainConsole
from sandmill.reports.excerpt import make_excerpt
from sandmill.reports.halves import Halves
from sandmill.reports.inert import inert, inert_html, script_json
from sandmill.reports.metrics import RunRecord, read_episodes
from sandmill.reports.page import page_data
from sandmill.reports.table import print_summary, summarise

SCRIPTS = ("draw.js", "page.js", "reader.js")


def write_report(record: RunRecord, path: Path | None = None) -> Path:
    """Writes the page (default: report.html in the run folder) in one atomic move. Raises RunError or DiskFull."""
    target = path or record.folder / "report.html"
    data = render_report(record, target).encode("utf-8")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".report-", suffix=".html", delete=False) as stream:
            try:
                stream.write(data)
                stream.flush()
                os.fchmod(stream.fileno(), 0o644)
                os.replace(stream.name, target)
            except BaseException:
                os.unlink(stream.name)
                raise
    except OSError as error:
        kind = DiskFull if error.errno == 28 else RunError
        raise kind(f"{target} could not be written: {error.strerror}; the run itself is intact") from None
    return target


def render_report(record: RunRecord, target: Path) -> str:
    """The whole page as text."""
    halves = Halves(record.steps[-1].step if record.steps else 0)
    excerpt = make_excerpt(halves.watching(read_episodes(record.folder)), (step.step for step in record.steps), record.folder)
    data = page_data(record, summarise(record, report=target), excerpt, halves)
    style, script = _asset("report.css"), "\n".join(_asset(name) for name in SCRIPTS)
    return string.Template(_asset("report.html")).substitute(
        title=html.escape(f"{inert(record.name, limit=120)} · Sandmill"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        summary=inert_html(_summary(record, target)),
        data=script_json(data),
    )


def _summary(record: RunRecord, target: Path) -> str:
    text = io.StringIO()
    print_summary(record, report=target, console=PlainConsole(text))
    return text.getvalue()


def _asset(name: str) -> str:
    return resources.files("sandmill.reports").joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    """The source expression of a Content-Security-Policy for one inline element."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
