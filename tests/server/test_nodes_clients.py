"""The published SDK and command line, unchanged, where every sandbox is on a node: each call has the result that it has without nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import compatibility
from node_process import heading


def test_every_call_of_the_published_clients(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local") as head:
        head.join("a")
        command = [sys.executable, compatibility.__file__, "--results"]
        done = subprocess.run(command, env=head.environment, capture_output=True, timeout=150)
        assert done.returncode == 0, done.stderr
    found = {(row["part"], row["title"]): row["result"] for row in map(json.loads, done.stdout.splitlines())}
    expected = {(call.part, call.title): f"refused: {call.refused}" if call.refused else "works" for call in compatibility.CALLS}
    assert {key: result for key, result in found.items() if result != expected[key]} == {}
    assert found.keys() == expected.keys()
