"""The published SDK and command line, unchanged, where every sandbox is on a node: each call has the result that it has without nodes.

But for those about images, which are made and kept on the server's own machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import compatibility
from node_process import heading

IMAGES = r"(?i)\bimage|snapshot|dockerfile|wait for its failure"
SCRIPT = f"""
import json, re, compatibility
compatibility.CALLS[:] = [call for call in compatibility.CALLS if not re.search({IMAGES!r}, call.title)]
for row in compatibility.results():
    print(json.dumps(row), flush=True)
"""


def test_every_call_of_the_published_clients(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local") as head:
        head.join("a")
        environment = head.environment | {"PYTHONPATH": str(Path(compatibility.__file__).parent)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, timeout=150)
        assert done.returncode == 0, done.stderr
    found = {(row["part"], row["title"]): row["result"] for row in map(json.loads, done.stdout.splitlines())}
    calls = [call for call in compatibility.CALLS if not re.search(IMAGES, call.title)]
    expected = {(call.part, call.title): f"refused: {call.refused}" if call.refused else "works" for call in calls}
    assert {key: result for key, result in found.items() if result != expected[key]} == {}
    assert found.keys() == expected.keys()
    assert len(found) > 60
