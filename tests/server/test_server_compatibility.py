"""The published SDK and command line, unchanged, against a real server: the judge of the wire contract."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import compatibility
import pytest
from server_process import serving

Results = dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    with serving(tmp_path_factory.mktemp("compatibility")) as server:
        command = [sys.executable, compatibility.__file__, "--results"]
        done = subprocess.run(command, env=server.environment, capture_output=True, timeout=500)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["part"], row["title"]): row["result"] for row in rows}


@pytest.mark.parametrize("call", compatibility.CALLS, ids=lambda call: call.title)
def test_call(results: Results, call: compatibility.Call) -> None:
    assert results[(call.part, call.title)] == (f"refused: {call.refused}" if call.refused else "works")


def test_the_page_says_what_was_found(results: Results) -> None:
    rows = [{"part": part, "title": title, "result": result} for (part, title), result in results.items()]
    assert Path(compatibility.DOCUMENT).read_text() == compatibility.document(rows)
