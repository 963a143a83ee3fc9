"""The SDK alone is light: `from sandmill import Sandbox` in a fresh interpreter."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

CODE = """
import json, sys, time
began = time.process_time()
from sandmill import Sandbox
cpu_ms = (time.process_time() - began) * 1000
heavy = sorted({"torch", "numpy", "transformers", "rich", "typer", "sandmill.environments", "sandmill.models"} & sys.modules.keys())
peak_mib = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) / 1024
print(json.dumps([cpu_ms, peak_mib, heavy]))
"""


def test_import_takes_under_150_ms_and_40_mb_and_no_torch() -> None:
    """Processor time: wall time on a machine busy with other tests measures the others."""
    runs = [json.loads(subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True).stdout) for _ in range(5)]
    assert statistics.median(cpu_ms for cpu_ms, _, _ in runs) < 150
    assert statistics.median(mib for _, mib, _ in runs) < 40
    assert [heavy for _, _, heavy in runs] == [[]] * 5


def test_importing_sandmill_starts_nothing() -> None:
    code = "import threading, sandmill; from sandmill import Sandbox; print(threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"


def test_exports_are_pinned_and_an_unknown_one_is_an_attribute_error() -> None:
    import sandmill

    assert sorted(sandmill.__all__) == sorted(
        ["PIPE", "Completed", "Egress", "Pool", "Process", "Sandbox", "SandboxSpec", "list_sandboxes", "stop_sandbox"]
    )
    assert all(getattr(sandmill, name) is not None for name in sandmill.__all__)
    assert not hasattr(sandmill, "Sandwich")
