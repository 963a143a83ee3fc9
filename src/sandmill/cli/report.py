"""`sandmill report RUN`: a run folder in; its report.html and a summary out."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

from sandmill.cli.progress import json_line
from sandmill.reports.html import write_report
from sandmill.reports.metrics import read_run
from sandmill.reports.table import print_summary, summarise


def run(folder: Path, *, show: bool, as_json: bool) -> int:
    """Writes the report and prints the summary; returns the exit code. Raises RunError when `folder` is no run folder."""
    record = read_run(folder)
    page = write_report(record)
    if as_json:
        sys.stdout.write(json_line(summarise(record, report=page)) + "\n")
    else:
        print_summary(record, report=page)
    if show and not webbrowser.open(page.resolve().as_uri()):
        sys.stderr.write("no browser could be started; open the page yourself\n")
    return 0
