"""The published SDK and command line as they stand against a real server, call by call; and docs/compatibility.md from it.

python tests/server/compatibility.py              writes docs/compatibility.md
python tests/server/compatibility.py --results    one JSON object a call on stdout, against the server of NODUS_API_URL
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import client_cli_calls
import client_sdk_calls  # noqa: F401 - its calls come next
import client_training_calls  # noqa: F401
from client_calls import CALLS, Call, Refused, Work
from server_process import serving

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def results() -> Iterator[dict[str, str]]:
    """Runs everything, in order, against the server of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "dev.yaml").write_text(client_cli_calls.MANIFEST)
        (root / "image.yaml").write_text(client_cli_calls.IMAGE)
        (root / "broken.yaml").write_text(client_cli_calls.BROKEN)
        (root / "manifests").mkdir()
        (root / "manifests" / "dev.yaml").write_text(client_cli_calls.MANIFEST)
        (root / "tree" / "sub").mkdir(parents=True)
        (root / "tree" / "a").write_text("a\n")
        (root / "tree" / "sub" / "b").write_text("b\n")
        work: Work = {"folder": folder}
        for call in CALLS:
            yield {"part": call.part, "title": call.title, "result": outcome(call, work)}


def outcome(call: Call, work: Work) -> str:
    """`works`, `refused: REASON`, or what went wrong."""
    try:
        call.run(work)
    except Refused as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        reason = getattr(error, "reason", None) or getattr(error, "code", None)
        return f"refused: {reason}" if reason else f"failed: {type(error).__name__}: {str(error)[:500]}"
    return "works"


def document(found: list[dict[str, str]]) -> str:
    """The page."""
    lines = [
        "# What the published client does here",
        "",
        f"Made by `scripts/compatibility`: `nodus-compute` {version('nodus-compute')} from PyPI, its SDK and its command line unchanged,",
        "against `sandmill serve` on loopback with only `NODUS_API_URL` and `NODUS_API_KEY` set. The tests run the same calls.",
        "",
    ]
    for part in dict.fromkeys(row["part"] for row in found):
        rows = [row for row in found if row["part"] == part]
        works = sum(row["result"] == "works" for row in rows)
        lines += [f"## {part}: {works} of {len(rows)} work", "", "| call | result |", "|---|---|"]
        for row in rows:
            call = next(call for call in CALLS if (call.part, call.title) == (row["part"], row["title"]))
            why = f" ({call.why})" if call.why and row["result"] != "works" else ""
            lines.append(f"| `{row['title'].replace('|', '&#124;')}` | {row['result']}{why} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    if "--results" in sys.argv:
        for row in results():
            print(json.dumps(row), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        done = subprocess.run([sys.executable, __file__, "--results"], env=server.environment, stdout=subprocess.PIPE, check=True)
    DOCUMENT.write_text(document([json.loads(line) for line in done.stdout.splitlines()]))
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
